"""Records of trials, and the choices made among them: the Pareto front, the best, those whose artifacts stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from compress.sweeps.metrics import METRICS
from compress.sweeps.models import Sweep
from compress.sweeps.pareto import pareto_front
from compress.sweeps.space import text_of

Status = Literal["proposed", "finished", "failed", "refused"]


@dataclass
class Trial:
    """One trial, as its record has it.

    Attributes:
        number: from 0, in the order they were proposed.
        values: by dotted keys.
        status: `proposed`: it runs, or a resume will run it; `refused`: the recipe cannot be carried out with these values;
            `failed`: it began and died, or there was no room for it. The last two have an `error`.
        metrics: by the names of `METRICS`; of the model it was made from: source. None: not finite.
        limits: sentences of the recipe's own limits that it exceeds.
        speed_error: why its speed could not be measured.
        search: the sampler's own notes, which it gets back after a resume.
        text: that its quality was measured on. seconds: wall-clock time; peak_memory: bytes; host: where it ran; threads: of torch.
    """

    number: int
    values: dict[str, Any]
    status: Status = "proposed"
    error: str | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    source: dict[str, float | None] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    speed_error: str | None = None
    search: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    seconds: float = 0.0
    peak_memory: int = 0
    host: str = ""
    threads: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The same text for the same values."""
        return text_of(self.values)

    @property
    def done(self) -> bool:
        """Whether the trial has ended, well or not."""
        return self.status != "proposed"

    @property
    def timed(self) -> bool:
        """Whether its speed was measured, or cannot be."""
        return self.speed_error is not None or "decode_speed" in self.metrics

    def objectives(self, sweep: Sweep) -> list[float | None]:
        """Its values of the objectives; None: not measured."""
        return [self.metrics.get(name) if self.status == "finished" else None for name in sweep.file.objectives]

    def broken(self, sweep: Sweep) -> list[str]:
        """Sentences on the limits and constraints that it violates."""
        found = list(self.limits)
        for constraint in sweep.constraints:
            value = self.metrics.get(constraint.metric)
            if constraint.excess(value) > 0:
                measured = "was not measured" if value is None else f"is {METRICS[constraint.metric].show(value)}"
                found.append(f"{constraint.metric} {measured}; the sweep asks for {constraint.describe()}")
        return found


def next_number(trials: Sequence[Trial]) -> int:
    """The smallest number that no trial has: that of a trial whose record was damaged comes first."""
    used = {trial.number for trial in trials}
    return next(number for number in range(len(trials) + 1) if number not in used)


def front(trials: Sequence[Trial], sweep: Sweep) -> list[int]:
    """Numbers of the trials that are on the Pareto front of the objectives: finished, measured, within limits and constraints."""
    directions = [METRICS[name].better for name in sweep.file.objectives]
    points = [[None] * len(directions) if trial.broken(sweep) else trial.objectives(sweep) for trial in trials]
    return [trials[index].number for index in pareto_front(points, directions)]


def best(trials: Sequence[Trial], sweep: Sweep) -> int | None:
    """Number of the trial on the front that is best in the first objective, of equal ones in the next, of equal ones the first."""
    on_front = set(front(trials, sweep))
    signs = [1.0 if METRICS[name].better == "min" else -1.0 for name in sweep.file.objectives]
    ranked = [
        ([sign * (value or 0.0) for sign, value in zip(signs, trial.objectives(sweep), strict=True)], trial.number)
        for trial in trials
        if trial.number in on_front
    ]
    return min(ranked)[1] if ranked else None


def kept(trials: Sequence[Trial], sweep: Sweep) -> set[int]:
    """Numbers of the trials whose artifacts stay, among those that are done."""
    if sweep.file.keep == "all":
        return {trial.number for trial in trials if trial.status == "finished"}
    if sweep.file.keep == "none":
        return set()
    if sweep.file.keep == "pareto":
        return set(front(trials, sweep))
    chosen = best(trials, sweep)
    return set() if chosen is None else {chosen}
