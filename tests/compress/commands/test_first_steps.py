"""What somebody who is new to it tries in the first hour, and what it says then."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compress
from compress.core.resources import bundled_recipes, recipes_directory
from compress.recipe import load, locate_model
from runtime.api.load import refuse_unfinished
from runtime.errors import ArtifactError, RequestError


@pytest.mark.slow
@pytest.mark.parametrize(("module", "processes"), [("compress", "1"), ("compress", "2"), ("compress.cli", "1")])
def test_a_module_that_is_run_says_by_its_exit_code_whether_it_worked(
    module: str, processes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun -m compress` knows nothing else of it."""
    monkeypatch.setenv("WORLD_SIZE", processes)  # of several, each ends without unloading libraries
    command = [sys.executable, "-m", module]
    wrong = subprocess.run([*command, "apply", "llama_w5"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "no such recipe file" in wrong.stderr
    right = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (right.returncode, right.stdout) == (0, f"{compress.__version__}\n")


def test_a_bundled_recipe_that_is_copied_means_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(bundled_recipes()["llama_w4"], tmp_path / "mine.yaml")
    bundled = recipes_directory() / "checkpoints" / "stdlib-4m"
    assert locate_model(load("mine.yaml")) == bundled
    (tmp_path / "checkpoints" / "stdlib-4m").mkdir(parents=True)  # what is there comes first
    assert locate_model(load("mine.yaml")) == Path("checkpoints/stdlib-4m")
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(RequestError, match="checkpoints/stdlib-4n"):
        locate_model(load("mine.yaml", set=["model=checkpoints/stdlib-4n"]))


def test_values_may_be_set_by_key_from_python() -> None:
    as_texts = load("llama_w4", set=["calibration.samples=7", "stages.0.quantize.group_size=64"])
    by_key = load("llama_w4", set={"calibration.samples": 7, "stages.0.quantize.group_size": 64})
    assert by_key.resolved() == as_texts.resolved() != load("llama_w4").resolved()
    with pytest.raises(RequestError, match=r"set=\{'calibration.sampels': ...\}"):
        load("llama_w4", set={"calibration.sampels": 7})
    with pytest.raises(RequestError, match="expected a dotted key"):
        load("llama_w4", set={"calibration..samples": 7})
    assert load("llama_w4", set="calibration.samples=7").calibration.samples == 7, "one text, not its letters"


def test_a_sweep_is_no_recipe() -> None:
    with pytest.raises(RequestError, match="compress sweep llama_bits"):
        load("llama_bits")


def test_an_unfinished_run_is_called_so(tmp_path: Path) -> None:
    (tmp_path / ".compress").mkdir()
    (tmp_path / ".compress" / "run.json").write_text("{}")
    with pytest.raises(ArtifactError, match="--resume"):
        refuse_unfinished(tmp_path)
    (tmp_path / "compress.json").write_text("{}")  # a new run over a finished artifact has not replaced it yet
    refuse_unfinished(tmp_path)
