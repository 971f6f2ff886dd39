"""What optional parts need is named by packages of the index, never by the name of this one."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from runtime.system import distribution


def test_an_extra_is_spelled_out() -> None:
    assert (
        distribution.requirements("gguf")
        == [text for text in distribution.requirements("gguf") if text.startswith("gguf>=")]
        != []
    )
    assert distribution.how_to_install("sweep").startswith("pip install 'optuna>=")
    assert set(distribution.requirements("onnx")) < set(distribution.requirements("tensorrt")), (
        "an extra that is in another one"
    )
    for extra in ("onnx", "tensorrt", "gguf", "eval", "sweep", "ray", "gpu"):
        assert "compress" not in distribution.how_to_install(extra)
        assert ";" not in distribution.how_to_install(extra), "no markers, which a shell would end the command at"


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
        *distribution.requirements("sweep"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", gone)
    assert distribution.how_to_install("sweep") == "pip install -e '.[sweep]' in a checkout of compress"
    other = SimpleNamespace(requires=["boltons", "pytest; extra == 'dev'"])
    monkeypatch.setattr(metadata, "distribution", lambda name: other)  # somebody else's
    assert distribution.requirements("sweep") == []
