"""One process's share of a pass over the blocks, where several make one artifact.

Calibration batches are dealt out, so each process keeps the hidden states of its own and sums what its own show; the sums are added up
before they become means. Layers that are to be solved are dealt out too, and what was solved goes to all, so that every process has the
same block before it goes on. Only the main process writes the artifact; hidden states are written by whom they belong to, into the output
directory, which all processes see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from compress.distill.team import Team
from compress.statistics import StatisticsCollector
from runtime.errors import CompressError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Share:
    """What this process does of a pass; by default all of it.

    Attributes:
        team: the processes.
    """

    team: Team = field(default_factory=Team)

    @property
    def size(self) -> int:
        return self.team.size

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def is_main(self) -> bool:
        return self.team.is_main

    def mine(self, count: int) -> list[int]:
        """Numbers of the calibration batches, of `count`, that this process reads."""
        return list(range(self.rank, count, self.size))

    def owner(self, number: int) -> int:
        """Rank of the process that reads a calibration batch."""
        return number % self.size

    def same(self, value: Value) -> Value:
        """The main process's value, in all."""
        return self.team.agreed(value)

    def meet(self) -> None:
        """Wait until all are here."""
        if self.size > 1:
            self.team.meet()

    # ------------------------------------------------------------ statistics
    def add_up(self, collector: StatisticsCollector) -> None:
        """Make the sums of a collector those of what all processes have seen; all call it for the same collectors in the same order."""
        if self.size > 1:
            collector.pool(_all_reduce)

    # ------------------------------------------------------------ layers
    def deal(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each of some independent pieces of work: the largest first, each to who has least to do."""
        load = [0.0] * self.size
        owners = [0] * len(costs)
        for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
            owner = min(range(self.size), key=lambda rank: (load[rank], rank))
            owners[number] = owner
            load[owner] += costs[number]
        return owners

    def exchange(self, value: Value | None, owner: int) -> Value:
        """What process `owner` gives (the others give None), in all."""
        found = self.team.told(value, owner)
        if found is None:
            raise CompressError(
                f"process {owner} has not done its share of a block; this is a bug, nothing was written"
            )
        return found

    def check_same(self, what: str, found: Any) -> None:
        """CompressError, in all, where the processes have come to different results of what each computes for itself."""
        every = [self.team.told(found if self.rank == rank else None, rank) for rank in range(self.size)]
        if any(other != every[0] for other in every):
            raise CompressError(
                f"the {self.size} processes do not agree on {what}; run them on machines of one kind with one version of everything, or "
                "run a single process"
            )


def _all_reduce(values: torch.Tensor, operation: str) -> None:
    kinds = {
        "sum": torch.distributed.ReduceOp.SUM,
        "min": torch.distributed.ReduceOp.MIN,
        "max": torch.distributed.ReduceOp.MAX,
    }
    torch.distributed.all_reduce(values, kinds[operation])
