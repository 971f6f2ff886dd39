"""What a sweep says on stderr while it works: a line a trial."""

from __future__ import annotations

import time

from rich.console import Console

from compress.commands.output import duration
from compress.sweeps.labels import Labels
from compress.sweeps.metrics import METRICS
from compress.sweeps.models import Sweep
from compress.sweeps.records import Trial

_OFTEN = 10.0  # seconds between lines on what is checked


class Talk:
    """`quiet` keeps it to trials that fail."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._errors = Console(stderr=True)
        self._total = self._done = 0
        self._next = time.monotonic() + _OFTEN

    def checking(self, done: int, total: int) -> None:
        """How many points are checked; says it now and then, where there are so many that one wonders."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _OFTEN
            self._print(self._console, f"checked {done} of {total} combinations")

    def begin(self, total: int, done: int, where: str) -> None:
        """How much there is to do."""
        self._total, self._done = max(total, done), done
        before = f", {done} of them done" if done else ""
        self._print(self._console, f"{self._total} trials{before}: {where}")

    def settled(self, trial: Trial, sweep: Sweep) -> None:
        """What came of a trial."""
        self._done += 1
        head = f"[{self._done}/{self._total}] trial {trial.number}: {Labels(sweep).sentence(trial.values)}"
        if trial.status != "finished":
            self._print(self._errors, f"{head}: {trial.status}: {trial.error}", "yellow")
            return
        numbers = ", ".join(
            f"{name} {METRICS[name].show(trial.metrics[name])}"
            for name in sweep.file.objectives
            if trial.metrics.get(name) is not None
        )
        broken = "".join(f"; {sentence}" for sentence in trial.limits)
        self._print(self._console, f"{head}: {numbers}{broken} ({duration(trial.seconds)})")

    def warn(self, sentence: str) -> None:
        """What does not end the sweep, and somebody should know."""
        self._print(self._errors, f"warning: {sentence}", "yellow")

    def timed(self, trial: Trial) -> None:
        """What came of measuring a trial's speed."""
        if trial.speed_error is not None:
            self._print(
                self._errors, f"  trial {trial.number}: its speed was not measured: {trial.speed_error}", "yellow"
            )
        else:
            speed = METRICS["decode_speed"].show(trial.metrics.get("decode_speed"))
            self._print(self._console, f"  trial {trial.number}: {speed} tokens/s")

    @staticmethod
    def _print(console: Console, line: str, style: str | None = None) -> None:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
