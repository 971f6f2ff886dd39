"""What optional parts need is named by packages of the index, never by the name of this one."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from runtime.system import native


def test_an_extra_is_spelled_out() -> None:
    assert (
        native.requirements("gguf") == [text for text in native.requirements("gguf") if text.startswith("gguf>=")] != []
    )
    assert native.how_to_install("sweep").startswith("pip install 'optuna>=")
    assert set(native.requirements("onnx")) < set(native.requirements("tensorrt")), "an extra that is in another one"
    for extra in ("onnx", "tensorrt", "gguf", "eval", "sweep", "ray", "gpu"):
        assert "compress" not in native.how_to_install(extra)
        assert ";" not in native.how_to_install(extra), "no markers, which a shell would end the command at"


def test_pip_understands_it() -> None:
    """What is installed for the tests is there already, so nothing is fetched."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--no-index",
        *native.requirements("sweep"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", gone)
    assert native.how_to_install("sweep") == "pip install -e '.[sweep]' in a checkout of compress"
    monkeypatch.setattr(metadata, "requires", lambda name: ["boltons", "pytest; extra == 'dev'"])  # somebody else's
    assert native.requirements("sweep") == []
