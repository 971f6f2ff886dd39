"""What a run tells its user while it works: a progress bar on stderr, and every line with its time in the output's log file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from runtime.system.sizes import size


class Progress(Protocol):
    """Who is told what goes on; `Reporter` is one."""

    def phase(self, title: str, total: int) -> None:
        """`total` steps begin."""

    def step(self, note: str) -> None:
        """One of them is done."""


class Reporter:
    """Progress for people (stderr) and for later (log file). `quiet` keeps stderr to warnings."""

    def __init__(self, log_file: Path | None, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._file = log_file.open("a", encoding="utf-8") if log_file is not None else None
        self._start = time.monotonic()
        self._task: TaskID | None = None
        self._live = sys.stderr.isatty() and not quiet
        self._progress = Bars(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=self._console, transient=True,
        )  # fmt: skip
        self.warnings: list[str] = []

    def __enter__(self) -> Reporter:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()
        if error is not None:
            self._write(f"stopped: {kind.__name__ if kind else ''}: {error}")
        if self._file is not None:
            self._file.close()
            self._file = None

    def phase(self, title: str, total: int, done: int = 0) -> None:
        """Start a bar of `total` steps of which `done` are finished already (a resume)."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(title, total=total, completed=done, note="")
        self._write(f"{title}: {done}/{total}")

    def step(self, note: str) -> None:
        """One step of the phase is done; `note` says what it gave (layer, error)."""
        memory = size(memory_bytes())
        if self._task is not None:
            self._progress.update(self._task, advance=1, note=f"{memory}  {note}")
        self._write(f"{note} [memory {memory}]")
        if not self._live:
            self._console.print(f"  {note}", style="dim", highlight=False, markup=False)

    def detail(self, note: str) -> None:
        """Shown beside the bar, without counting as a step; kept in the log."""
        if self._task is not None:
            self._progress.update(self._task, note=f"{size(memory_bytes())}  {note}")
        self._write(note)

    def info(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False)
        self._write(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        Console(stderr=True).print(f"warning: {message}", style="yellow", highlight=False, markup=False)
        self._write(f"warning: {message}")

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} +{time.monotonic() - self._start:8.2f}s  {line}\n")
            self._file.flush()


def memory_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)
