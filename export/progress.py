"""What an export tells its user while it works: a bar on stderr where that is a terminal, plain lines where not."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Reporter:
    """See `export.target.Progress`. `quiet` leaves only warnings."""

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

    def __enter__(self) -> Reporter:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def phase(self, title: str, total: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(title, total=total, note="")
        if not self._live:
            self._console.print(f"  {title}", style="dim", highlight=False, markup=False)

    def step(self, note: str = "") -> None:
        if self._task is not None:
            self._bar.update(self._task, advance=1, note=note)

    def info(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        Console(stderr=True).print(f"warning: {message}", style="yellow", highlight=False, markup=False)
