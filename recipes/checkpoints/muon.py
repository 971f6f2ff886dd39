"""Muon in float32, for CPUs on which ``torch.optim.Muon`` is slow."""

from __future__ import annotations

import math
from typing import Any

import torch


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return about the nearest semi-orthogonal matrices to ``matrices`` ``[k, m, n]``: five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.775, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon in float32, matrices of one shape together.

    ``torch.optim.Muon`` computes in bf16, which takes longer than the rest of the step on a CPU without bf16 units.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the matrices; the update of an entry has the size of one of AdamW at the same rate."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for matrix in group["params"]:
                shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                update = orthogonalize(torch.stack([self.momentum(matrix, group) for matrix in matrices]))
                for matrix, direction in zip(matrices, update, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(shape)))

    def momentum(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Accumulate the gradient of ``matrix`` and return it with Nesterov momentum."""
        assert matrix.grad is not None
        average = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - group["momentum"])
        return matrix.grad.lerp(average, group["momentum"])
