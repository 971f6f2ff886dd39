"""A stage kind of another package: planned, applied, resumed and reported as those of compress are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TIMED
from safetensors.torch import load_file

KILLED = """
import os, sys
import compress
from compress.model.checkpoint_writer import PlainWriter

write = PlainWriter.write

def killed(self, part, *arguments):
    if part == 1:
        os._exit(9)
    return write(self, part, *arguments)

PlainWriter.write = killed
compress.apply(sys.argv[1], output=sys.argv[2], quiet=True)
"""
DEVIATIONS = 1.5


@pytest.fixture
def recipe(tiny_llama: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`recipe(*stages)`: a file."""

    def write(*stages: dict[str, Any]) -> Path:
        file = tmp_path / "recipe.yaml"
        file.write_text(json.dumps({"name": "test", "model": str(tiny_llama()), "stages": list(stages)}, indent=1))
        return file

    return write


def clip(**fields: Any) -> dict[str, Any]:
    return {"clip": {"method": "deviations", "deviations": DEVIATIONS, **fields}}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.slow
def test_it_is_planned(extension, recipe) -> None:
    request = recipe(clip(), {"quantize": {"method": "rtn", "bits": 8, "group_size": 32}})
    plan = json.loads(extension.compress("plan", request, "--json").stdout)
    assert plan["passes"] == ["weights clipped at 1.5 standard deviations"]
    assert plan["memory"]["clip"] > 0
    assert "clip" in extension.compress("methods").stdout
    assert "standard deviations" in extension.compress("methods", "show", "deviations").stdout


def test_it_is_applied_and_reported(extension, recipe, tiny_llama, tmp_path) -> None:
    out = tmp_path / "out"
    extension.compress("apply", recipe(clip()), "--output", out, "--quiet", "--prompt", "")
    before, after = tensors(tiny_llama()), tensors(out)
    (facts,) = json.loads((out / "compress.json").read_text())["passes"]
    assert facts["clip"] == "deviations"
    assert facts["clipped"] == sum(int((before[name] != value).sum()) for name, value in after.items()) > 0
    for name, value in after.items():
        if ".layers." in name and value.ndim == 2:
            whole = before[name].float()
            most = whole.mean() + DEVIATIONS * whole.std()
            assert value.float().max() <= most.to(value.dtype).float(), name
        else:
            assert torch.equal(value, before[name]), name
    told = f"{facts['clipped']:,}"
    page = (out / "report.html").read_text()
    assert told in page
    assert "<h2>Clipping</h2>" in page
    assert "Other stages" not in page
    shown = extension.compress("inspect", out).stdout
    assert "weights clipped by deviations" in shown
    assert told in shown


@pytest.mark.slow
def test_a_run_that_was_killed_in_it_ends_with_the_same_bytes(extension, recipe, tmp_path) -> None:
    request = recipe(clip(), {"quantize": {"method": "rtn", "bits": 8, "group_size": 32}})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    extension.compress("apply", request, "--output", whole, "--quiet", "--prompt", "")
    assert extension.python(KILLED, request, resumed, check=False).returncode == 9
    assert not (resumed / "compress.json").exists()
    extension.compress("apply", request, "--output", resumed, "--quiet", "--prompt", "", "--resume")
    names = {file.name for file in whole.iterdir() if file.name not in TIMED}
    assert names == {file.name for file in resumed.iterdir() if file.name not in TIMED}
    for name in names:
        assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name


@pytest.mark.slow
def test_what_is_wrong_is_refused_with_its_line(extension, recipe) -> None:
    done = extension.compress("plan", recipe(clip(sigmas=3)), check=False)
    assert done.returncode == 2
    assert "stages.0.clip.sigmas" in done.stderr
    done = extension.compress("plan", recipe({"quantize": {"method": "rtn"}}, clip()), check=False)
    assert done.returncode == 2
    assert "stages.1.clip" in done.stderr
