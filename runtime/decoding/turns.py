"""Turns of all that uses a model's engine: schedulers, a step each, and calls that score or encode.

Each keeps its own cache, so the engine is free between two steps: they interleave.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

_POLITE_SECONDS = 0.02
_NAP_SECONDS = 2e-5


class Turns:
    """Who may use an engine now. One a model; each call takes a `Caller` of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: set[int] = set()  # threads that want the lock; a hint, see `Caller.run`
        self.taken = 0  # turns so far


class Caller:
    """The turns of one scheduler, or of one call that needs none.

    A lock alone is unfair: whoever releases it mostly has it back before a waiting thread has woken up. So a caller that had
    the last turn lets the others go first. That rests on hints only. What keeps two threads apart is the lock, taken by `with`
    alone, which an interrupt (Ctrl-C) cannot leave locked.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._mine = -1

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """`function(*arguments)`, while no other caller's runs."""
        turns = self._turns
        if turns.waiting and turns.taken == self._mine:
            self._give_way()
        me = threading.get_ident()
        try:
            turns.waiting.add(me)
            with turns.lock:
                turns.waiting.discard(me)
                turns.taken += 1
                self._mine = turns.taken
                return function(*arguments)
        finally:
            turns.waiting.discard(me)

    def _give_way(self) -> None:
        turns = self._turns
        deadline = time.monotonic() + _POLITE_SECONDS
        while turns.waiting and turns.taken == self._mine:
            if time.monotonic() > deadline:  # an interrupt left a hint behind, or the machine is very busy
                turns.waiting.clear()
                return
            time.sleep(_NAP_SECONDS)
