"""Proposals of trials: a grid, or a search by Optuna's samplers, whose study is built from the records for every proposal.

So a proposal depends on the seed, its number and the trials before, and on nothing that a kill could lose: with one job, an interrupted
sweep continues with the trials that it would have had.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from compress.sweeps.metrics import METRICS
from compress.sweeps.models import SearchConfig, Sweep
from compress.sweeps.records import Trial, next_number
from compress.sweeps.space import MOST, Choices, Values, text_of, tidy
from runtime.errors import RequestError
from runtime.system.distribution import how_to_install

_ATTEMPTS = 10  # proposals of a sampler before one that was tried already is given up


class Grid:
    """Proposes the points that no trial has had yet; `total` is how many trials there will be."""

    def __init__(self, sweep: Sweep) -> None:
        self.points = list(points(sweep))
        self.total = len(self.points)

    def propose(self, trials: Sequence[Trial]) -> Trial | None:
        """The next trial after `trials`, or None: there are no more."""
        tried = {trial.key for trial in trials}
        values = next((values for values in self.points if text_of(values) not in tried), None)
        return None if values is None else Trial(next_number(trials), values)


def points(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """The values of every point, by dotted keys.

    Raises:
        RequestError: a range without steps, or too many points.
    """
    counts = {}
    for key, values in sweep.vary.items():
        count = values.count()
        if count is None:
            raise RequestError(f"vary.{key}: a grid needs a list, or a range with a step; a search needs no step")
        if getattr(values, "log", False):
            raise RequestError(f"vary.{key}: log is for searches; a grid needs a list of values")
        counts[key] = count
    total = math.prod(counts.values())
    if total > MOST:
        most = max(counts, key=lambda key: counts[key])
        raise RequestError(f"vary: {total:,} points ({counts[most]:,} values of {most}); at most {MOST:,} are allowed")
    lists = {key: values.grid() or [] for key, values in sweep.vary.items()}
    return (dict(zip(lists, combination, strict=True)) for combination in itertools.product(*lists.values()))


class Study:
    """Proposes trials until there are as many as asked for, or no more values; none twice. `total`: as of `Grid`."""

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna
        except ImportError as error:
            text = f"Optuna is not installed; {how_to_install('sweep')}, or use `search: grid`, which does not need it"
            raise RequestError(f"search: {text}") from error
        assert sweep.file.search is not None
        self._optuna: Any = optuna
        self._sweep = sweep
        self._config: SearchConfig = sweep.file.search
        self._distributions = {key: self._distribution(values) for key, values in sweep.vary.items()}
        counts = [values.count() for values in sweep.vary.values()]
        self._points = None if None in counts else math.prod(count or 0 for count in counts)
        self.total = min(self._config.trials, self._points or self._config.trials)

    def propose(self, trials: Sequence[Trial]) -> Trial | None:
        """The next trial after `trials`, of which some may run still; None: there are no more."""
        if len(trials) >= self.total:
            return None
        number = next_number(trials)
        tried = {trial.key for trial in trials}
        before = [trial for trial in trials if trial.number < number]  # all of them, unless a record was damaged
        for attempt in range(_ATTEMPTS):
            values, notes = self._ask(before, attempt)
            if text_of(values) not in tried:
                return Trial(number, values, search=notes)
        return self._untried(tried, number)

    def _ask(self, trials: Sequence[Trial], attempt: int) -> tuple[dict[str, Any], dict[str, Any]]:
        with _quiet(self._optuna):
            directions = ["minimize" if METRICS[n].better == "min" else "maximize" for n in self._sweep.file.objectives]
            study = self._optuna.create_study(directions=directions, sampler=self._sampler(len(trials), attempt))
            for trial in trials:
                study.add_trial(self._told(trial))
            asked = study.ask(self._distributions)
            notes = dict(study.get_trials(deepcopy=False)[-1].system_attrs)
        return {key: self._value(key, asked.params[key]) for key in self._sweep.vary}, notes

    def _told(self, trial: Trial) -> Any:
        states = self._optuna.trial.TrialState
        values = trial.objectives(self._sweep)
        complete = trial.status == "finished" and None not in values
        excess = {c.describe(): c.excess(trial.metrics.get(c.metric)) for c in self._sweep.constraints}
        return self._optuna.trial.create_trial(
            state=states.COMPLETE if complete else states.RUNNING if not trial.done else states.FAIL,
            values=values if complete else None,
            params={
                key: text_of(trial.values[key]) if isinstance(kind, Choices) else trial.values[key]
                for key, kind in self._sweep.vary.items()
            },
            distributions=self._distributions,
            system_attrs=dict(trial.search),
            constraints={**excess, "limits": float(len(trial.limits))} if complete else None,
        )

    def _sampler(self, number: int, attempt: int) -> Any:
        import numpy

        seed = int(numpy.random.SeedSequence([self._config.seed, number, attempt]).generate_state(1)[0])
        samplers = self._optuna.samplers
        given = {"n_startup_trials": self._config.startup, "population_size": self._config.population}
        options = {name: value for name, value in given.items() if value is not None}
        if self._config.sampler == "tpe":
            return samplers.TPESampler(seed=seed, constant_liar=True, **options)
        kinds = {"random": samplers.RandomSampler, "nsgaii": samplers.NSGAIISampler}
        return kinds[self._config.sampler](seed=seed, **options)

    def _distribution(self, values: Values) -> Any:
        kinds = self._optuna.distributions
        if isinstance(values, Choices):
            # As text, so that any value can be a choice, and 1 and true are two.
            return kinds.CategoricalDistribution([text_of(value) for value in values.choices])
        if values.integers:
            return kinds.IntDistribution(int(values.low), int(values.last), log=values.log, step=int(values.step or 1))
        return kinds.FloatDistribution(values.low, values.last, log=values.log, step=values.step)

    def _value(self, key: str, parameter: Any) -> Any:
        values = self._sweep.vary[key]
        if isinstance(values, Choices):
            return json.loads(parameter)
        return tidy(parameter) if values.step is not None and not values.integers else parameter

    def _untried(self, tried: set[str], number: int) -> Trial | None:
        """Any values that were not tried, where the sampler comes back to the same ones."""
        import numpy

        if self._points is None or self._points > MOST:
            return None
        left = [values for values in points(self._sweep) if text_of(values) not in tried]
        if not left:
            return None
        chosen = int(numpy.random.default_rng([self._config.seed, number]).integers(len(left)))
        return Trial(number, left[chosen])


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna, which logs every study and warns of experimental features."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def open_search(sweep: Sweep) -> Grid | Study:
    """The proposer of a sweep's trials."""
    return Grid(sweep) if sweep.file.search is None else Study(sweep)
