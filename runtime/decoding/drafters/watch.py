"""Running what may never come back: drafters that somebody else wrote."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

PATIENCE = 10.0  # seconds; a drafter that thinks longer than this over a few tokens is of no use


class StalledError(Exception):
    """It did not come back."""


class Watch:
    """Runs functions in a thread of its own, one after another, and stops waiting for one that takes too long.

    A thread cannot be ended from outside: the one that hangs is left alone (it does not keep the process from ending), and nothing
    runs here any more.

    Args:
        patience: seconds.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._work: queue.SimpleQueue[Any] | None = None

    def run(self, what: Callable[..., Result], *arguments: Any) -> Result:
        """What the function gives or raises.

        Raises:
            StalledError: it took too long.
        """
        if self._work is None:
            self._work = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._work,), name="drafter", daemon=True).start()
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._work.put((what, arguments, answer))
        try:
            done, value = answer.get(timeout=self.patience)
        except queue.Empty:
            self._work = None
            raise StalledError(f"it did not answer within {self.patience:g} seconds") from None
        if not done:
            raise value
        result: Result = value
        return result


def _serve(work: queue.SimpleQueue[Any]) -> None:
    while True:
        what, arguments, answer = work.get()
        try:
            answer.put((True, what(*arguments)))
        except Exception as error:
            answer.put((False, error))
