"""Progress of a run: a bar on stderr, and every line with its time in the output's log file."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

import psutil

from compress.core.tracking import Tracking
from runtime.system.progress import ProgressReporter
from runtime.system.sizes import size

Progress = ProgressReporter
"""Receiver of progress; a `Reporter` has a log file too."""


class Reporter(ProgressReporter):
    """Progress for people (stderr) and for later (log file). `quiet` keeps stderr to warnings."""

    def __init__(self, log_file: Path | None, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._file = log_file.open("a", encoding="utf-8") if log_file is not None else None
        self._start = time.monotonic()
        #: Receives numbers of the run beside people; nobody, unless the run is reported to a tracker.
        self.tracking = Tracking(None, "", {}, self.warn)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            self._write(f"stopped: {kind.__name__ if kind else ''}: {error}")
        if self._file is not None:
            self._file.close()
            self._file = None

    def phase(self, title: str, total: int, done: int = 0) -> None:
        """Start a bar of `total` steps of which `done` are finished already (a resume)."""
        self._begin(title, total, done)
        self._write(f"{title}: {done}/{total}")

    def step(self, note: str = "") -> None:
        """One step of the phase is done; `note` says what it gave (layer, error)."""
        memory = size(memory_bytes())
        self._advance(1, f"{memory}  {note}")
        self._write(f"{note} [memory {memory}]")
        self._line(note)

    def detail(self, note: str) -> None:
        """A note beside the bar and in the log that counts as no step."""
        self._advance(0, f"{size(memory_bytes())}  {note}")
        self._write(note)

    def info(self, message: str) -> None:
        super().info(message)
        self._write(message)

    def warn(self, message: str) -> None:
        super().warn(message)
        self._write(f"warning: {message}")

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} +{time.monotonic() - self._start:8.2f}s  {line}\n")
            self._file.flush()


def memory_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)
