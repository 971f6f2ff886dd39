"""Every name of TensorRT that our code uses is in the real bindings: by the listing offline, by the bindings themselves online."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from fake_tensorrt import module, real
from fake_tensorrt.listing import LISTING

from export.tensorrt.options import TensorrtOptions
from export.tensorrt.proof import TYPES
from runtime.engines.tensorrt.session import DTYPES

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [*(ROOT / "export" / "tensorrt").glob("*.py"), *(ROOT / "runtime" / "engines" / "tensorrt").glob("*.py")]
)
#: What a variable holds, by file (None: in all of them).
VARIABLES: dict[str | None, dict[str, str]] = {
    None: {
        "network": "INetworkDefinition", "builder": "Builder", "profile": "IOptimizationProfile",
        "parser": "OnnxParser", "refitter": "Refitter", "context": "IExecutionContext",
    },
    "build.py": {"config": "IBuilderConfig", "cache": "ITimingCache", "tensor": "ITensor", "error": "ParserError"},
    "engine.py": {"engine": "ICudaEngine", "parser": "OnnxParserRefitter"},
    "session.py": {"runtime": "Runtime", "engine": "ICudaEngine"},
}  # fmt: skip


@pytest.fixture(scope="session")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    try:
        return real.describe(tmp_path_factory.mktemp("bindings"))
    except real.UnavailableError as error:
        pytest.skip(str(error))


def names(file: Path) -> Iterator[tuple[str, str]]:
    """(class or enumeration, attribute) of everything of TensorRT's that a file reads, sets or calls; ("", name) of the module's."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    holds = {**VARIABLES[None], **VARIABLES.get(file.name, {})}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                dotted = _dotted(value)
                if isinstance(target, ast.Name) and dotted[:1] == ["trt"] and len(dotted) == 2:
                    holds[target.id] = dotted[1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        dotted = _dotted(node)
        if dotted[:1] == ["trt"]:
            for index in range(1, len(dotted)):
                yield ".".join(dotted[1:index]), dotted[index]
        elif len(dotted) == 2 and dotted[0] in holds:
            yield holds[dotted[0]], dotted[1]


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield from zip(target.elts, node.value.elts, strict=True)
    else:
        yield target, node.value


def _dotted(node: ast.expr) -> list[str]:
    """`self.session.trt.DataType` as ["trt", "DataType"]; `self.network.x` as ["network", "x"]."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    parts.reverse()
    for owner in ("trt", "network", "engine"):
        if owner in parts[1:-1] and parts[0] in ("self", "session"):
            return parts[parts.index(owner) :]
    return parts


def lacking(listing: dict[str, Any]) -> list[str]:
    """What our code uses and a listing has not."""
    return sorted(
        f"{file.name}: {owner}.{name}"
        for file in FILES
        for owner, name in names(file)
        if not _has(listing, owner, name)
    )


def _has(listing: dict[str, Any], owner: str, name: str) -> bool:
    enums, classes = listing["enums"], listing["classes"]
    if not owner:
        return name in enums or name in classes or name in listing["aliases"] or name == "__version__"
    if owner in enums:
        return name in enums[owner]
    if owner == "ILogger.Severity":
        return name in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")
    known = classes[owner]
    return name in known["properties"] or name in known["methods"]


def test_the_search_finds_what_is_used() -> None:
    found = {pair for file in FILES for pair in names(file)}
    assert len(found) > 50
    for pair in [
        ("Builder", "build_serialized_network"), ("NetworkDefinitionCreationFlag", "STRONGLY_TYPED"), ("OnnxParser", "parse_from_file"),
        ("BuilderFlag", "SPARSE_WEIGHTS"), ("IExecutionContext", "execute_async_v3"), ("ICudaEngine", "weight_streaming_budget_v2"),
        ("", "OnnxParser"), ("OnnxParserRefitter", "refit_from_file"), ("Refitter", "refit_cuda_engine"),
    ]:  # fmt: skip
        assert pair in found, pair


def test_a_wrong_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "build.py"
    file.write_text(
        "def f(self, trt):\n    self.network.get_imput(1)\n    kind = trt.BuilderFlag\n    return kind.SPARSE\n"
    )
    wrong = [pair for pair in names(file) if not _has(LISTING, *pair)]
    assert sorted(wrong) == [("BuilderFlag", "SPARSE"), ("INetworkDefinition", "get_imput")]


def test_the_stand_in_has_nothing_else() -> None:
    trt: Any = module()
    builder = trt.Builder(None)
    network = builder.create_network(0)
    with pytest.raises(TypeError):
        network.get_input(number=0)
    with pytest.raises(TypeError):
        network.get_input()
    with pytest.raises(AttributeError, match="no add_rope"):
        network.add_rope()
    with pytest.raises(AttributeError, match="no property scale"):
        builder.create_builder_config().scale = 1
    with pytest.raises(AttributeError):
        trt.BuilderFlag.SPARSE  # noqa: B018


def test_all_names_are_in_the_listing() -> None:
    assert lacking(LISTING) == []


def test_types_and_operations_by_text_are_members() -> None:
    kinds = LISTING["enums"]["DataType"]
    assert set(TYPES.values()) | set(DTYPES) <= set(kinds)
    levels = get_args(TensorrtOptions.model_fields["hardware_compatibility"].annotation)
    assert {level.upper() for level in levels} <= set(LISTING["enums"]["HardwareCompatibilityLevel"])


def test_the_listing_is_the_real_bindings(bindings: dict[str, Any]) -> None:
    assert bindings["version"] == real.VERSION
    assert bindings == LISTING


def test_all_names_are_in_the_real_bindings(bindings: dict[str, Any]) -> None:
    assert lacking(bindings) == []
