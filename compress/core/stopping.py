"""SIGTERM and SIGHUP as an exception, so that what a command has begun is cleaned up before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(SystemExit):
    """The process was asked to end. No `except Exception` holds it up.

    Attributes:
        code: what it ends with, 128 and the signal's number: 143 after SIGTERM, 129 after SIGHUP.
        signal: the signal's name.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.code: int = 128 + number
        self.signal = signal.Signals(number).name


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` in the main thread where SIGTERM or SIGHUP would have ended the process at once.

    A signal that is ignored (`nohup`) or has a handler already is left alone; outside the main thread nothing is done, since
    Python lets only that one set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, _stop)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    # A terminal that closes sends both, and the second must not cut the cleaning up short. Only while they are ours to set.
    for other in _SIGNALS:
        if signal.getsignal(other) is _stop:
            signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)
