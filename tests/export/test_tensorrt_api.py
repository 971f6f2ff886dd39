"""Every name of TensorRT that our code uses is in the real bindings: by the listing offline, by the bindings themselves online."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from fake_tensorrt import real
from fake_tensorrt.listing import LISTING

from export.tensorrt.layers import TORCH
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.weights import TYPES
from runtime.engines.tensorrt.session import DTYPES

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "export" / "tensorrt").glob("*.py"), *(ROOT / "runtime" / "engines").glob("tensorrt*.py")])
#: What a variable holds, by file (None: in all of them).
VARIABLES: dict[str | None, dict[str, str]] = {
    None: {
        "network": "INetworkDefinition", "builder": "Builder", "profile": "IOptimizationProfile",
        "parser": "OnnxParser", "refitter": "Refitter", "context": "IExecutionContext",
    },
    "native.py": {"attention": "IAttention", "rows": "IGatherLayer", "layer": "IRotaryEmbeddingLayer", "tensor": "ITensor"},
    "layers.py": {"tensor": "ITensor"},
    "build.py": {"config": "IBuilderConfig", "cache": "ITimingCache", "tensor": "ITensor"},
    "parsed.py": {"error": "ParserError"},
    "tensorrt.py": {"engine": "ICudaEngine"},
    "tensorrt_session.py": {"runtime": "Runtime", "engine": "ICudaEngine"},
    "tensorrt_refit.py": {"parser": "OnnxParserRefitter"},
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
    assert len(found) > 80
    for pair in [
        ("INetworkDefinition", "add_attention_v2"), ("INetworkDefinition", "add_kv_cache_update"), ("CausalMaskKind", "LOWER_RIGHT"),
        ("BuilderFlag", "SPARSE_WEIGHTS"), ("IExecutionContext", "execute_async_v3"), ("ICudaEngine", "weight_streaming_budget_v2"),
        ("", "OnnxParser"), ("IAttention", "key_value_lengths"), ("Refitter", "set_named_weights"),
    ]:  # fmt: skip
        assert pair in found, pair


def test_a_wrong_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "native.py"
    file.write_text(
        "def f(self, trt):\n    self.network.add_atention(1)\n    kind = trt.CausalMaskKind\n    return kind.LOWER_LEFT\n"
    )
    wrong = [pair for pair in names(file) if not _has(LISTING, *pair)]
    assert sorted(wrong) == [("CausalMaskKind", "LOWER_LEFT"), ("INetworkDefinition", "add_atention")]


def test_all_names_are_in_the_listing() -> None:
    assert lacking(LISTING) == []


def test_types_and_operations_by_text_are_members() -> None:
    kinds = LISTING["enums"]["DataType"]
    assert {kind for kind, _ in TYPES.values()} | set(TORCH) | set(DTYPES) <= set(kinds)
    levels = get_args(TensorrtOptions.model_fields["hardware_compatibility"].annotation)
    assert {level.upper() for level in levels} <= set(LISTING["enums"]["HardwareCompatibilityLevel"])
    wanted = {"elementwise": "ElementWiseOperation", "unary": "UnaryOperation", "cast": "DataType"}
    checked = 0
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in wanted:
                texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                members = LISTING["enums"][wanted[node.func.attr]]
                for text in texts:
                    if text.isupper():
                        assert text in members, (file.name, text)
                        checked += 1
    assert checked >= 10


def test_the_listing_is_the_real_bindings(bindings: dict[str, Any]) -> None:
    assert bindings["version"] == real.VERSION
    assert bindings == LISTING


def test_all_names_are_in_the_real_bindings(bindings: dict[str, Any]) -> None:
    assert lacking(bindings) == []
