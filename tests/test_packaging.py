"""The wheel: complete, nothing beside what belongs into it, and usable where there is no source checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import compress

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import json, sys
from compress.core import resources
import compress, export, runtime
print(json.dumps({
    "package": compress.__file__, "recipes": sorted(resources.bundled_recipes()), "directory": str(resources.recipes_directory()),
    "text": resources.bundled_text("heldout").is_file(), "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built in this process by the build backend itself, so that no network is needed."""
    from hatchling.builders.wheel import WheelBuilder

    directory = tmp_path_factory.mktemp("wheel")
    return Path(next(iter(WheelBuilder(str(ROOT)).build(directory=str(directory), versions=["standard"]))))


def test_everything_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("compress", "export", "runtime")
        for pattern in ("*.py", "*.c", "*.txt")
        for path in (ROOT / package).rglob(pattern)
    }
    assert "compress/core/native/columns.c" in here
    assert {f"compress/data/samples/{kind}.txt" for kind in ("text", "code", "chat")} <= here
    assert here <= names
    recipes = {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    assert recipes
    assert {f"compress/_recipes/{name}" for name in recipes} <= names
    sweeps = {path.name for path in (ROOT / "recipes" / "sweeps").glob("*.yaml")}
    assert sweeps
    assert {f"compress/_recipes/sweeps/{name}" for name in sweeps} <= names
    for file in ("stdlib-4m/config.json", "stdlib-4m/tokenizer.json", "texts/calibration.txt", "texts/heldout.txt"):
        assert f"compress/_recipes/checkpoints/{file}" in names
    assert {f"{package}/py.typed" for package in ("compress", "export", "runtime")} <= names


def test_nothing_else_is_in_it(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"compress", "export", "runtime"}


def test_it_works_without_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert found["package"].startswith(str(site))
    assert found["directory"] == str(site / "compress" / "_recipes")
    assert found["recipes"] == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert found["text"]
    assert not found["torch"]  # importing the packages costs nothing until they are used


def test_license_and_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/recipes/checkpoints/LICENSE-PSF.txt") for name in names)
    for extra in ("test", "gpu", "tensorrt", "onnx", "eval", "sweep", "ray", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    scripts = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "compress = compress.cli:main" in scripts


# ---------------------------------------------------------------- the runtime alone
RUNTIME_ALONE = """
import sys
import runtime
model = runtime.load(sys.argv[1], device="cpu")
print(model.generate("import os", max_new_tokens=3, temperature=0.0))
print(runtime.__file__, *sorted(sys.modules))
"""


@pytest.fixture(scope="module")
def runtime_wheel(tmp_path_factory) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    directory = tmp_path_factory.mktemp("runtime-wheel")
    return Path(next(iter(WheelBuilder(str(ROOT / "runtime")).build(directory=str(directory), versions=["standard"]))))


def _closure(names: set[str]) -> set[str]:
    """Distributions that these need, themselves included, extras left out."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    left = {canonicalize_name(name) for name in names}
    while left:
        name = left.pop()
        found.add(name)
        try:
            stated = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        for requirement in stated:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left |= {canonicalize_name(requirement.name)} - found
    return found


def test_the_runtime_is_a_distribution_of_its_own(runtime_wheel):
    names = set(zipfile.ZipFile(runtime_wheel).namelist())
    here = {p.relative_to(ROOT).as_posix() for k in ("*.py", "*.c", "*.h") for p in (ROOT / "runtime").rglob(k)}
    assert here <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"runtime"}
    assert "runtime/pyproject.toml" not in names
    stated = [
        tomllib.loads((ROOT / path).read_text())["project"] for path in ("pyproject.toml", "runtime/pyproject.toml")
    ]
    assert stated[0]["version"] == stated[1]["version"] == compress.__version__
    whole, alone = (set(project["dependencies"]) for project in stated)
    assert alone < whole


def test_the_runtime_runs_without_what_only_compressing_needs(runtime_wheel, tmp_path):
    """In a Python that has nothing but the runtime's wheel and the distributions that it asks for."""
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement

    stated = tomllib.loads((ROOT / "runtime/pyproject.toml").read_text())["project"]["dependencies"]
    site = tmp_path / "site"
    zipfile.ZipFile(runtime_wheel).extractall(site)
    for name in _closure({Requirement(text).name for text in stated}):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHOME"} | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUNTIME_ALONE, str(ROOT / "recipes/checkpoints/stdlib-4m")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    place, *modules = done.stdout.splitlines()[-1].split()
    assert place.startswith(str(site))
    assert not {"compress", "export", "datasets", "matplotlib", "accelerate", "optuna"} & set(modules)
