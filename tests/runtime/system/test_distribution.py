"""Optional parts are installed by the name of this distribution, which is not `compress`: on the index that is somebody else's."""

from __future__ import annotations

import sys
from email.message import Message
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.system import distribution

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]


def there(monkeypatch: pytest.MonkeyPatch, name: str, *extras: str) -> None:
    """Only this distribution is installed."""
    facts = Message()
    facts["Name"] = name
    for extra in extras:
        facts["Provides-Extra"] = extra

    def find(asked: str) -> SimpleNamespace:
        if asked != name:
            raise metadata.PackageNotFoundError(asked)
        return SimpleNamespace(metadata=facts)

    monkeypatch.setattr(metadata, "distribution", find)


def test_the_names_are_those_of_the_projects() -> None:
    files = ("pyproject.toml", "runtime/pyproject.toml")
    projects = [tomllib.loads((ROOT / file).read_text())["project"] for file in files]
    assert tuple(project["name"] for project in projects) == distribution.NAMES
    for text in [need for needs in projects[0]["optional-dependencies"].values() for need in needs]:
        assert not text.startswith("compress["), "somebody else's"


def test_an_extra_is_added_to_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, "compress-checkpoints", "sweep", "onnx")
    assert distribution.how_to_install("sweep") == "pip install 'compress-checkpoints[sweep]'"
    there(monkeypatch, "compress-checkpoints-runtime", "onnx")
    assert distribution.how_to_install("onnx") == "pip install 'compress-checkpoints-runtime[onnx]'"
    assert distribution.how_to_install("sweep") == "pip install -e '.[sweep]' in a checkout of compress"


def test_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, "compress", "sweep")  # somebody else's
    assert distribution.how_to_install("sweep") == "pip install -e '.[sweep]' in a checkout of compress"
