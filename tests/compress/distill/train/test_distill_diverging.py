"""Trainings that diverge: they stop, keep the best weights, and say so in numbers that JSON knows."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from compress.distill.train.data import Batch, TextRows
from compress.distill.train.loop import DivergedError, Goal, Trained, Training
from compress.distill.train.options import TrainOptions


class Scripted(nn.Module):
    """A number that every step changes; what is measured of it on held-out rows is written down beforehand."""

    phase = "scripted"

    def __init__(self, looks: list[float], forgiving: bool = True, larger: bool = False, bad_step: int = -1) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1, 1))
        self.goal = Goal("loss", larger=larger, relative=True)
        self.forgiving, self.looks, self.bad_step = forgiving, iter(looks), bad_step
        self.steps, self.held = 0, list[float]()

    def check(self, training: Training) -> None:
        pass

    def forward(self, batch: Batch, targets: None) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps += 1
        loss = self.number.sum() * (math.nan if self.steps == self.bad_step else 1.0)
        return loss * batch.trained.sum(), batch.trained.sum().float()

    def measure(self, batch: Batch, targets: Any) -> dict[str, tuple[float, float]]:
        self.held.append(float(self.number.detach()))
        return {"loss": (next(self.looks), 1.0), "cross_entropy": (2.0, 1.0)}

    def describe_means(self, means: dict[str, float]) -> str:
        return str(means)

    def describe(self) -> dict[str, Any]:
        return {}


def train(learner: Scripted, steps: int = 4) -> Trained:
    rows = TextRows(torch.zeros(4, 8, dtype=torch.int64))
    options = TrainOptions(steps=steps, batch=2, evaluate_every=1, patience=None, learning_rate=0.1)
    cpu = torch.device("cpu")
    accelerator = Accelerator(cpu=True)
    held_out = TextRows(rows.ids[:1])
    return Training(learner, rows, None, held_out, None, options, accelerator=accelerator, device=cpu).run()


def strict(trained: Trained) -> dict[str, Any]:
    """The facts as a reader that knows JSON alone reads them."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(json.dumps(trained.facts()), parse_constant=refuse)
    return found


@pytest.mark.parametrize("last", [11.0, math.nan, math.inf])
def test_a_held_out_loss_that_explodes_ends_the_training_with_the_best_weights(last: float) -> None:
    learner = Scripted([1.0, 0.9, 0.8, last])
    trained = train(learner)
    assert trained.ended == "diverged"
    assert (trained.steps, trained.best_step) == (3, 2)
    assert float(learner.number.detach()) == learner.held[2] != learner.held[3]
    facts = strict(trained)
    assert facts["before"] == {"loss": 1.0, "cross_entropy": 2.0}
    assert facts["after"] == {"loss": 0.8, "cross_entropy": 2.0}
    expected = last if math.isfinite(last) else None
    assert facts["curve"]["held_out"][-1] == {"step": 3, "loss": expected, "cross_entropy": 2.0}


def test_a_loss_that_is_no_number_ends_the_training_too() -> None:
    learner = Scripted([1.0, 0.9, 0.8], bad_step=3)
    trained = train(learner)
    assert (trained.ended, trained.steps, trained.best_step) == ("diverged", 2, 2)
    assert float(learner.number.detach()) == learner.held[2]
    strict(trained)
    with pytest.raises(DivergedError, match="step 3 is nan"):
        train(Scripted([1.0, 0.9, 0.8], forgiving=False, bad_step=3))


@pytest.mark.parametrize(
    ("looks", "fields"),
    [
        ([1.0, 9.9, 0.5, 0.4, 0.3], {}),  # ten times as much is too much
        ([0.001, 0.02, 0.49, 0.0009, 0.0008], {}),  # of next to nothing too, but that is still little
        ([1.0, 50.0, 0.5, 0.4, 0.3], {"forgiving": False}),
        ([1.0, 50.0, 60.0, 70.0, 80.0], {"larger": True}),
    ],
)
def test_what_can_come_back_goes_on(looks: list[float], fields: dict[str, Any]) -> None:
    trained = train(Scripted(looks, **fields))
    assert (trained.ended, trained.steps, trained.best_step) == ("steps", 4, 4)


def test_any_number_is_better_than_none() -> None:
    learner = Scripted([math.nan, 3.0, 4.0, 2.0, 5.0])
    trained = train(learner)
    assert (trained.ended, trained.best_step) == ("steps", 3)
    assert float(learner.number.detach()) == learner.held[3]
    facts = strict(trained)
    assert facts["before"] == {"cross_entropy": 2.0}
    assert facts["curve"]["held_out"][0]["loss"] is None
    goal = Goal("loss", larger=False)
    assert not goal.better(math.nan, math.nan)
    assert not goal.better(math.nan, 1.0)
