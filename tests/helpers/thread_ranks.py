"""Ranks of tensor parallelism that are threads of one process: what `runtime.system.ranks.Ranks` does, without torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class ThreadRanks:
    """One of several ranks. `board`: where all put what they exchange; `barrier`: they wait for each other at it."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self._board, self._barrier = board, barrier
        self.sums = 0

    @classmethod
    def make(cls, size: int) -> list[ThreadRanks]:
        """All of them."""
        board, barrier = [None] * size, threading.Barrier(size, timeout=60)
        return [cls(rank, size, board, barrier) for rank in range(size)]

    def every(self, value: Any) -> list[Any]:
        """What each says."""
        self._board[self.rank] = value
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all have."""
        self.sums += 1
        total = torch.stack(self.every(x.clone())).sum(0)
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each has."""
        found = self.every(x.clone())
        assert len({each.shape for each in found}) == 1, "ranks send tensors of different shapes"
        return found


def on_all(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the functions give, each in a thread of its own; the first error of one."""
    found: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            found[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return found
