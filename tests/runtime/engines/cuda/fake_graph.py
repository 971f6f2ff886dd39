"""A stand-in for CUDA graphs on the CPU."""

from __future__ import annotations

import torch

from runtime.engines.cuda.engine import Computation


class Fake:
    """Captures like CUDA: the computation runs twice to warm up, once to be captured, and is replayed without anything new."""

    def __init__(self) -> None:
        self.captures: list[int] = []
        self.replays: list[int] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(self, compute: Computation) -> Computation:
        for _ in range(2):
            compute()
        number = len(self.captures)
        self.captures.append(number)
        logits, states = (torch.full_like(each, float("nan")) for each in compute())  # every replay writes here
        self.outputs += [logits, states]

        def replay() -> tuple[torch.Tensor, torch.Tensor]:
            self.replays.append(number)
            for output in self.outputs:  # graphs share their memory
                output.fill_(float("nan"))
            for static, found in zip((logits, states), compute(), strict=True):
                static.copy_(found)
            return logits, states

        return replay
