"""A bundle's description, the command that finishes it, and machines on which TensorRT is half there."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt.install import install

import export
import runtime
import runtime.engines.tensorrt.engine as engines
from compress.cli import main
from runtime.errors import ArtifactError, RequestError

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

Made = Callable[..., Path]
_GONE = object()


@pytest.fixture(scope="module")
def bundle(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("with spaces") / "my 'bundle'"
    export.export(made("dense"), "tensorrt", out, quiet=True, verify=False, bundle=True)
    return out


# ---------------------------------------------------------------- the command
def test_the_command_is_quoted(bundle: Path) -> None:
    words = ["compress", "export", str(bundle), "--target", "tensorrt", "--output", f"{bundle}-engine"]
    facts = json.loads((bundle / "export.json").read_text())["tensorrt"]
    assert shlex.split(facts["finish"]) == words
    assert shlex.split(facts["say"][1].partition(": ")[2]) == words
    with pytest.raises(RequestError) as caught:
        runtime.load(bundle, device="cpu")
    assert shlex.split(str(caught.value).partition(" with ")[2].partition("with ")[2])[-7:] == words
    readme = (bundle / "README.md").read_text()
    command = next(line for line in readme.splitlines() if "compress export" in line).removeprefix("#   ")
    assert shlex.split(command)[2] == bundle.name
    code = next(line for line in readme.splitlines() if "runtime.load" in line)
    compile(code, "README.md", "exec")


def test_a_bundle_of_a_bundle_is_refused(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(RequestError, match=r"\bbundle\b"):
        export.export(bundle, "tensorrt", tmp_path / "out", quiet=True, bundle=True)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- build.json
@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("dtype", _GONE), ("dtype", "INT4"), ("sparse", [3]), ("artifact", []), ("changed", "yes"),
        ("rounds_inputs", _GONE), ("losses", {"a": "b"}), ("conversions", _GONE), ("conversions.0", "text"),
        ("conversions", [{"what": "x"}]), ("model", {}), ("model.layers", "2"), ("limits.max_batch", _GONE),
        ("limits.max_batch", "8"), ("options.max_batch", "many"), ("options.nonsense", 1), ("files", []), ("files.model\\.onnx", _GONE),
        ("files.model\\.onnx.bytes", "12"), ("files.model\\.onnx.bytes", _GONE), ("files.model\\.onnx.sha256", None),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, value: Any
) -> None:
    install(monkeypatch)
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    content = json.loads((copy / "build.json").read_text())
    content["conversions"] = content["conversions"] or [{"what": "x", "modules": ["a"], "exact": True, "bytes": None}]
    *path, last = (part.replace("\0", ".") for part in entry.replace("\\.", "\0").split("."))
    owner = content
    for part in path:
        owner = owner[part]
    if value is _GONE:
        del owner[last]
    else:
        owner[int(last) if isinstance(owner, list) else last] = value
    (copy / "build.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=rf"build\.json.* entry {entry}") as caught:
        export.export(copy, "tensorrt", tmp_path / "out", quiet=True)
    assert "\n" not in str(caught.value)


def test_a_bundle_of_an_earlier_version_is_finished(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the entries that the network of TensorRT's own layers was made from."""
    copy = tmp_path / "bundle"
    export.export(made("dense"), "tensorrt", copy, quiet=True, verify=False, bundle=True, dtype="float32")
    install(monkeypatch)
    content = json.loads((copy / "build.json").read_text())
    content["aliases"] = {"model.norm.weight": "val_0"}
    content["model"] |= {
        "heads": 4,
        "hidden": 128,
        "unknown": None,
        "eps": 1e-5,
        "rotation": [1.0],
        "norms": False,
        "tied": True,
    }
    (copy / "build.json").write_text(json.dumps(content))
    result = export.export(copy, "tensorrt", tmp_path / "out", quiet=True, verify=False)
    assert result.facts["engine"] is True


# ---------------------------------------------------------------- TensorRT that cannot be imported
BROKEN = 'raise {error}("libcudart.so.13: cannot open shared object file\\nand more")\n'


@pytest.fixture(params=["ImportError", "OSError", "RuntimeError"])
def broken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package tensorrt that does not find CUDA."""
    package = tmp_path / "site" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN.format(error=request.param))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)


@pytest.mark.usefixtures("broken")
def test_tensorrt_that_cannot_be_imported_is_none(made: Made, tmp_path: Path) -> None:
    result = export.export(made("dense"), "tensorrt", tmp_path / "out", quiet=True, verify=False)
    assert result.facts["engine"] is False
    why = "TensorRT is installed and cannot be imported (libcudart.so.13: cannot open shared object file)"
    assert result.facts["reason"] == why
    assert why in result.facts["say"][0]


@pytest.mark.usefixtures("broken")
def test_an_engine_that_is_required_is_refused_with_the_reason(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(made("dense")), "--target", "tensorrt", "--output", str(tmp_path / "out")]
    assert main([*arguments, "--require-engine", "--no-verify"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "libcudart.so.13" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("broken")
def test_the_runtime_says_what_cannot_be_imported() -> None:
    with pytest.raises(RequestError, match="libcudart"):
        engines.tensorrt_module({"version_compatible": False, "refit": None})
