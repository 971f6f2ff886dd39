"""Progress on stderr: a bar where that is a terminal, plain lines where it is not."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressReporter:
    """A bar for each phase, and messages. Use it as a context manager.

    Args:
        quiet: warnings only.

    Attributes:
        warnings: those given so far.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._live = sys.stderr.isatty() and not quiet
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=self._console, transient=True,
        )  # fmt: skip
        self.warnings: list[str] = []

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def phase(self, title: str, total: int, done: int = 0) -> None:
        """Start a bar of `total` steps, of which `done` are finished already."""
        self._begin(title, total, done)
        self._line(title)

    def step(self, note: str = "") -> None:
        """One step of the phase is done."""
        self._advance(1, note)

    def info(self, message: str) -> None:
        """A line that stays."""
        self._console.print(message, highlight=False, markup=False)

    def warn(self, message: str) -> None:
        """A warning, which `quiet` does not silence."""
        self.warnings.append(message)
        Console(stderr=True).print(f"warning: {message}", style="yellow", highlight=False, markup=False)

    def _begin(self, title: str, total: int, done: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(title, total=total, completed=done, note="")

    def _advance(self, steps: int, note: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, advance=steps, note=note)

    def _line(self, text: str) -> None:
        """Where there is no bar."""
        if not self._live:
            self._console.print(f"  {text}", style="dim", highlight=False, markup=False)
