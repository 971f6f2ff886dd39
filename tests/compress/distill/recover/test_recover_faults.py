"""Recoveries that go wrong: a training that diverges, a process of several that fails on the way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from warm_python import torchrun

import compress
from compress.distill.train import loop
from compress.report import write_report

RECOVER = {
    "method": "finetune",
    "samples": 24,
    "sequence_length": 32,
    "steps": 9,
    "batch_size": 4,
    "evaluate_every": 3,
    "learning_rate": 1e-6,
}


def refuse(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_a_manifest_is_json_however_a_training_ends(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """`first`: nothing is a number from the first look on."""
    real = loop.Training.measure

    def measured(self: Any) -> dict[str, float]:
        found = real(self)
        return found if self.at.step < 6 and not first else dict.fromkeys(found, math.nan)

    monkeypatch.setattr(loop.Training, "measure", measured)
    request = recipe(make_checkpoint(), {"prune": {"method": "magnitude", "sparsity": 0.5}}, {"recover": RECOVER})
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (facts,) = json.loads((made.path / "compress.json").read_text(), parse_constant=refuse)["passes"]
    assert facts["ended"] == "diverged"
    assert facts["steps"] == (3 if first else 6)
    assert facts["best_step"] == (0 if first else 3)
    assert facts["curve"]["held_out"][-1]["loss"] is None
    assert ("perplexity_before" in facts) == ("loss" in facts["before"]) == (not first)
    assert any("diverged" in warning for warning in made.warnings)
    page = write_report(made.path).read_text()
    assert "nan" not in page.lower().replace("nano", "")


@pytest.mark.slow
def test_a_training_that_brings_nothing_says_so(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.Training.measure
    monkeypatch.setattr(
        loop.Training,
        "measure",
        lambda run: {name: value + 0.1 * run.at.step for name, value in real(run).items()},
    )
    request = recipe(make_checkpoint(), {"prune": {"method": "magnitude", "sparsity": 0.5}}, {"recover": RECOVER})
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    assert (facts["ended"], facts["best_step"]) == ("steps", 0)
    (warning,) = [warning for warning in made.warnings if "recovery:" in warning]
    assert "held-out text got no better in 9 steps" in warning


PROGRAM = """
import gc, os, sys, torch
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
import compress
from compress.distill.train import checkpoint
from compress.distill.recover import recovery as recover
from runtime.errors import CompressError

request, where, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])

def fail(*_, **__):
    raise CompressError("there is no room for it")

if what == "save" and rank == 0:
    checkpoint.save = fail      # the others wait until the checkpoint is there
if what == "whole" and rank == 1:
    recover.whole = fail        # the main process goes on to the training
try:
    made = compress.apply(request, output=where / "out", device="cpu", quiet=True)
    text = "done"
except BaseException as error:
    text = f"{type(error).__name__}: {error}"
    if any(type(each) is DistributedDataParallel for each in gc.get_objects()):
        text += " (holds the connections: the last to let go of them waits for their threads, maybe for ever)"
(where / f"{rank}.txt").write_text(text)
os._exit(0)                     # no launcher ends the others
"""
ROOM = "CompressError: there is no room for it"
LOST = (
    "CompressError: another of the 2 processes has ended, which says why; where it says nothing, it was killed, most likely for memory. "
    "What was finished stays"
)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "ends"), [("save", [ROOM, LOST]), ("whole", [LOST, ROOM])])
def test_an_error_in_a_process_ends_the_recovery_in_both(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, what: str, ends: list[str]
) -> None:
    stages = {"prune": {"method": "magnitude", "sparsity": 0.5}}, {"recover": RECOVER}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(make_checkpoint(), *stages)))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = torchrun(2, tmp_path / "program.py", tmp_path / "recipe.yaml", tmp_path, what)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ends
    assert not (tmp_path / "out" / "compress.json").exists()
