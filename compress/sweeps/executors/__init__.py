"""Executors of trials: `processes` on this machine, `ray_cluster` on a Ray cluster. Both run `compress.sweeps.trial.run_trial`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

Outcome = dict[str, Any]
"""Result of `run_trial`; of a trial whose process died, `status` failed and an `error` that says how."""

_LAUNCHED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


class Executor(Protocol):
    """Runs trials beside each other, each in a process of its own.

    Attributes:
        slots: most trials at a time.
        description: where they run, in words.
    """

    slots: int
    description: str

    def start(self, number: int, job: Mapping[str, Any]) -> None:
        """Begin a trial; `job` is as `run_trial` takes it, but for `threads` and `device`, which the executor decides."""

    def wait(self) -> list[tuple[int, Outcome]]:
        """Wait until some trial has ended; the number and the outcome of each that has."""

    def close(self) -> None:
        """End all running trials."""


def launcher_variables(names: Iterable[str]) -> list[str]:
    """Those environment variables by which a launcher names other processes, for which a trial would wait for ever."""
    return [name for name in names if _LAUNCHED.fullmatch(name)]


def died(how: str, log: str) -> Outcome:
    """The outcome of a trial whose process ended without a result."""
    return {"status": "failed", "error": f"{how}; its last output is in {log}"}
