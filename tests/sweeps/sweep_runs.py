"""An executor that runs the trials of a sweep in this process: quick, and the same trial function."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from compress.sweeps.trial import run_trial

BITS, GROUP = "stages.0.quantize.bits", "stages.0.quantize.group_size"


class Here:
    """See `compress.sweeps.executors.Executor`. `started` holds the numbers of the trials, `most` of them begin at a time."""

    description = "this process"

    def __init__(self, slots: int = 1, before: Callable[[int], None] = lambda number: None) -> None:
        self.slots = slots
        self.started: list[int] = []
        self.most = 0
        self._before = before
        self._jobs: list[tuple[int, Any]] = []

    def start(self, number, job):
        self.started.append(number)
        self._jobs.append((number, {**job, "threads": 1, "device": "cpu"}))
        self.most = max(self.most, len(self._jobs))

    def wait(self):
        number, job = self._jobs.pop(0)
        self._before(number)
        # What goes to another process is text.
        return [(number, json.loads(json.dumps(run_trial(json.loads(json.dumps(job))))))]

    def close(self):
        self._jobs.clear()
