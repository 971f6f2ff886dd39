"""Search for the best subset where a trial is expensive: Bayesian optimization over subsets, then exchange of members."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Subset = tuple[int, ...]  # ascending
Objective = Callable[[Subset], float]

_NOISE = 1e-4  # of values with variance 1: close sets never say exactly the same
_SCALES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # members that two sets may differ in before they say little of each other
_SHARES = (0.0, 0.3, 0.7, 0.95)  # of what members do to the value each by itself
_CANDIDATES = 200  # random sets that are looked at for the next one to try
_CLIMBS = 5  # from the best of which the promise is followed uphill
_POLISH = 0.3  # share of the trials for exchanging members of the best set


@dataclass
class Search:
    """What was tried.

    Attributes:
        values: {subset: its value}, in the order in which they were tried.
    """

    values: dict[Subset, float] = field(default_factory=dict)

    @property
    def best(self) -> Subset:
        """Of equals the smaller, then the first."""
        return max(self.values, key=lambda subset: (self.values[subset], -len(subset)))

    def curve(self) -> list[float]:
        """The best value after each trial."""
        return np.maximum.accumulate(list(self.values.values())).tolist()


def search(
    objective: Objective,
    members: int,
    trials: int,
    *,
    starts: Sequence[Sequence[int]] = (),
    seed: int = 0,
    told: Callable[[Search], None] | None = None,
) -> Search:
    """Look for the subset of 0 .. members - 1 whose value is largest.

    A Gaussian process over subsets says what one may be worth: the sum of what its members do each by itself, and something that is alike
    in subsets that differ in few. The next to be tried is the one of largest expected improvement (Bayesian optimisation, as in Draft &
    Verify, arXiv 2309.08168). The last part of the trials adds, removes and exchanges members of the best one, the most promising first.

    Args:
        objective: deterministic.
        members: at least 1. trials: calls of the objective at most, at least 1; it is called once for a subset.
        starts: tried first.
        seed: of what is random.
        told: is called after every trial.
    """
    found, draw = Search(), np.random.default_rng(seed)
    trials = min(trials, 2**members)

    def attempt(subset: Subset) -> None:
        if subset not in found.values and len(found.values) < trials:
            found.values[subset] = float(objective(subset))
            if told is not None:
                told(found)

    for start in starts:
        attempt(tuple(sorted(set(start))))
    first = min(trials, len(found.values) + 2 + members // 4)
    while len(found.values) < first:  # of every size, more of the small ones: what is left out adds up
        attempt(_subset(draw.random(members) < draw.random() ** 2))
    polished = max(len(found.values), round(trials * (1 - _POLISH)))
    while len(found.values) < polished:
        attempt(_promising(found, members, draw))
    while len(found.values) < trials:
        before = found.best
        for subset in _neighbours(found, members):
            attempt(subset)
            if found.best != before:
                break
        else:
            attempt(_promising(found, members, draw))
    return found


class Process:
    """A Gaussian process over rows of zeros and ones. Of rows that differ in d of n members the covariance is that of a linear function,
    1 - 2 d / n, plus exp(-d / l), in the shares and with the l that make what was seen likeliest.

    Args:
        rows: bool `[n, members]`. values: `[n]`.
    """

    def __init__(self, rows: np.ndarray, values: np.ndarray) -> None:
        self._rows = rows
        self._mean, self._spread = float(values.mean()), float(values.std()) or 1.0
        target = (values - self._mean) / self._spread
        distances = _distances(rows, rows)
        best = -np.inf
        for setting in itertools.product(_SCALES, _SHARES):
            kernel = self._kernel(distances, *setting) + _NOISE * np.eye(len(rows))
            lower = np.linalg.cholesky(kernel)
            weights = np.linalg.solve(lower.T, np.linalg.solve(lower, target))
            likelihood = -0.5 * float(target @ weights) - float(np.log(np.diag(lower)).sum())
            if likelihood > best:
                best, self._setting, self._lower, self._weights = likelihood, setting, lower, weights

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations `[m]` of the values of rows `[m, members]`."""
        cross = self._kernel(_distances(rows, self._rows), *self._setting)
        half = np.linalg.solve(self._lower, cross.T)
        variance = np.maximum(1.0 - (half**2).sum(0), 1e-12)
        return self._mean + self._spread * cross @ self._weights, self._spread * np.sqrt(variance)

    def _kernel(self, distances: np.ndarray, scale: float, linear: float) -> np.ndarray:
        members = self._rows.shape[1]
        return linear * (1 - 2 * distances / members) + (1 - linear) * np.exp(-distances / scale)


def improvement(means: np.ndarray, deviations: np.ndarray, best: float) -> np.ndarray:
    """How much more than `best` normally distributed values are expected to be, where they are more."""
    z = (means - best) / deviations
    below = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2)))
    return (means - best) * below + deviations * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)


def _promising(found: Search, members: int, draw: np.random.Generator) -> Subset:
    """An untried subset of the largest expected improvement that could be found."""
    tried = list(found.values)
    rows, values = _rows(tried, members), np.array(list(found.values.values()))
    process, best = Process(rows, values), float(values.max())

    def worth(candidates: np.ndarray) -> np.ndarray:
        gains = improvement(*process.predict(candidates), best)
        known = (_distances(candidates, rows) == 0).any(1)
        return np.where(known, -1.0, gains)

    leaders = rows[np.argsort(-values)[:_CLIMBS]]
    around = leaders[draw.integers(len(leaders), size=_CANDIDATES)] ^ (
        draw.random((_CANDIDATES, members)) < draw.uniform(0.5, 4.0, (_CANDIDATES, 1)) / members
    )
    candidates = np.concatenate([around, draw.random((_CANDIDATES, members)) < draw.random((_CANDIDATES, 1))])
    gains = worth(candidates)
    top, most = candidates[int(gains.argmax())], float(gains.max())
    for start in candidates[np.argsort(-gains)[:_CLIMBS]]:
        row = start
        value = float(worth(row[None])[0])
        while True:
            steps = row ^ np.eye(members, dtype=bool)
            gains = worth(steps)
            if gains.max() <= value:
                break
            row, value = steps[int(gains.argmax())], float(gains.max())
        if value > most:
            top, most = row, value
    if most < 0:  # everything near is known
        return _unknown(found, members, draw)
    return _subset(top)


def _neighbours(found: Search, members: int) -> list[Subset]:
    """Untried subsets that differ from the best in one member, or in one for another; the most promising first."""
    best = _rows([found.best], members)[0]
    single = best ^ np.eye(members, dtype=bool)
    inside, outside = np.flatnonzero(best), np.flatnonzero(~best)
    swaps = [best ^ np.isin(np.arange(members), (gone, new)) for gone in inside for new in outside]
    rows = np.concatenate([single, np.array(swaps).reshape(-1, members).astype(bool)])
    process = Process(_rows(list(found.values), members), np.array(list(found.values.values())))
    order = np.argsort(-process.predict(rows)[0], kind="stable")
    subsets = [_subset(rows[index]) for index in order]
    return [subset for subset in subsets if subset not in found.values]


def _unknown(found: Search, members: int, draw: np.random.Generator) -> Subset:
    while True:
        subset = _subset(draw.random(members) < draw.random())
        if subset not in found.values:
            return subset


def _rows(subsets: Sequence[Subset], members: int) -> np.ndarray:
    return np.array([np.isin(np.arange(members), subset) for subset in subsets])


def _subset(row: np.ndarray) -> Subset:
    return tuple(int(index) for index in np.flatnonzero(row))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """In how many members rows differ, `[len(a), len(b)]`."""
    return (a[:, None] != b).sum(-1)  # type: ignore[no-any-return]
