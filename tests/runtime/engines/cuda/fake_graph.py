"""A stand-in for CUDA graphs on the CPU."""

from __future__ import annotations

import torch

from runtime.engines.cuda.steps import Computation


class Fake:
    """Captures like CUDA: the computation runs twice to warm up, once to be captured, and is replayed without anything new."""

    def __init__(self) -> None:
        self.captures: list[int] = []
        self.replays: list[int] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(self, compute: Computation) -> FakeGraph:
        for _ in range(2):
            compute()
        self.captures.append(len(self.captures))
        return FakeGraph(self, self.captures[-1], compute)


class FakeGraph:
    def __init__(self, log: Fake, number: int, compute: Computation) -> None:
        self._log, self._number, self._compute = log, number, compute
        self.output = torch.full_like(compute(), float("nan"))  # static: every replay writes here
        log.outputs.append(self.output)

    def replay(self) -> None:
        self._log.replays.append(self._number)
        for output in self._log.outputs:  # graphs share their memory
            output.fill_(float("nan"))
        self.output.copy_(self._compute())
