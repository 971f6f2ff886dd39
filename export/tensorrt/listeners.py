"""What TensorRT calls back while it builds: its log and its progress."""

from __future__ import annotations

import threading
from typing import Any

from export.target import Progress

KEPT = 5  # errors of the log that a message repeats


def make_logger(trt: Any, progress: Progress) -> Any:
    """An `ILogger` that warns through `progress` and keeps errors in `.errors` for the message of a failed build."""

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            text = " ".join(msg.split())
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(text)
            elif severity == trt.ILogger.Severity.WARNING:
                progress.info(f"  TensorRT: {text}")

    return Logger()


def reasons(logger: Any) -> str:
    """The first errors of the log, for a message."""
    return "; ".join(logger.errors[:KEPT]) or "its log says no reason"


def make_monitor(trt: Any, progress: Progress) -> Any:
    """An `IProgressMonitor` that shows the outermost phases as bars. TensorRT calls it from several threads."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._lock = threading.Lock()
            self._shown: str | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                if not parent_phase:
                    self._shown = phase_name
                    progress.phase(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                if phase_name == self._shown:
                    progress.step()
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                if phase_name == self._shown:
                    self._shown = None

    return Monitor()
