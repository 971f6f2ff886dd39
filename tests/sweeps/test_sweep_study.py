"""Proposals of the searches, told of outcomes that are made up."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest

from compress.sweeps import load_sweep
from compress.sweeps.search import Study
from runtime.errors import RequestError

X, Y = "calibration.samples", "seed"


def make(settings, **keys):
    search = {"sampler": "tpe", "trials": 30, "seed": 3, **keys.pop("search", {})}
    vary = {X: {"low": 1, "high": 1000}, Y: {"low": 0.0, "high": 1.0}}
    return load_sweep(settings(**{"vary": vary, "search": search, **keys}))[0]


def carry_out(sweep, until=10**9, trials=(), quality=lambda values: (values[X] / 1000 - 0.3) ** 2 + values[Y]):
    study, trials = Study(sweep), list(trials)
    while len(trials) < until and (trial := study.propose(trials)) is not None:
        trial.status = "failed" if trial.number % 5 == 4 else "finished"
        if trial.status == "finished":
            trial.metrics = {"perplexity": quality(trial.values), "size": trial.values[X]}
        trials.append(trial)
    return trials


@pytest.mark.parametrize(
    "search", [{"sampler": "tpe", "startup": 5}, {"sampler": "random"}, {"sampler": "nsgaii", "population": 6}]
)
def test_the_same_seed_proposes_the_same_and_goes_on_so(settings, search):
    sweep = make(settings, search=search)
    whole = [trial.values for trial in carry_out(sweep)]
    assert len(whole) == 30
    assert [trial.values for trial in carry_out(sweep)] == whole
    part = [type(trial)(**asdict(trial)) for trial in carry_out(sweep, until=17)]
    assert [trial.values for trial in carry_out(sweep, trials=part)] == whole
    other = make(settings, search={**search, "seed": 4})
    assert [trial.values for trial in carry_out(other)] != whole
    assert all(1 <= values[X] <= 1000 and 0 <= values[Y] <= 1 for values in whole)


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii"])
def test_a_search_learns(settings, sampler):
    extra = {"population": 8} if sampler == "nsgaii" else {}
    sweep = make(settings, search={"sampler": sampler, "trials": 80, **extra}, objectives=["perplexity"])
    losses = [trial.metrics["perplexity"] for trial in carry_out(sweep) if trial.metrics]
    assert sum(losses[-20:]) < 0.85 * sum(losses[:20])


def test_constraints_are_learnt(settings):
    sweep = make(settings, search={"trials": 60}, objectives=["perplexity"], constraints={"size": {"max": 200}})
    trials = [trial for trial in carry_out(sweep, quality=lambda values: 1 - values[X] / 1000) if trial.metrics]
    late = [trial.metrics["size"] <= 200 for trial in trials[-20:]]
    assert sum(late) >= 10, "better is larger, and yet most keep the bound, which one of five does by chance"


def test_trials_that_run_are_heeded(settings):
    sweep = make(settings, search={"startup": 4})
    trials = carry_out(sweep, until=12)
    study = Study(sweep)
    for _ in range(4):
        trials.append(study.propose(trials))
    assert len({trial.key for trial in trials}) == 16
    assert all(trial.status == "proposed" for trial in trials[-4:])


def test_few_values_are_all_tried_once(settings):
    sweep = make(settings, vary={X: [1, 2, True], Y: [0, 0.5]}, search={"startup": 2})
    trials = carry_out(sweep, quality=lambda values: values[Y])
    assert len(trials) == 6
    assert len({trial.key for trial in trials}) == 6
    assert {repr(trial.values[X]) for trial in trials} == {"1", "2", "True"}


def test_steps_are_kept(settings):
    sweep = make(settings, vary={X: {"low": 16, "high": 70, "step": 16}, Y: {"low": 0.1, "high": 0.5, "step": 0.1}})
    trials = carry_out(sweep)
    assert {trial.values[X] for trial in trials} <= {16, 32, 48, 64}
    assert {trial.values[Y] for trial in trials} <= {0.1, 0.2, 0.3, 0.4, 0.5}
    assert len(trials) == 20


def test_without_optuna_the_extra_is_named(settings, monkeypatch):
    sweep = make(settings)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RequestError, match=r"compress-checkpoints\[sweep\]"):
        Study(sweep)
