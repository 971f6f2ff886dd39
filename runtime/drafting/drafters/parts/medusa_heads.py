"""Medusa's heads: what becomes of a hidden state, so that the target's own head says a token further ahead."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class MedusaHead(nn.Module):
    """Residual blocks x + SiLU(W x + b), then a linear map; all zero (the map: the identity) they change nothing.

    The head's own vocabulary projection is the map followed by the target's head, which all heads share: a projection of the rank of
    the hidden size that takes hidden^2 numbers, where one by itself takes vocabulary * hidden (32k tokens, hidden 2048: a sixteenth).
    """

    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + functional.silu(block(x))
        found: torch.Tensor = self.out(x)
        return found


class MedusaHeads(nn.Module):
    """Some heads, the k-th (from 1) for the token k + 1 positions after the one whose hidden state is read.

    Source: Cai et al., Medusa, arXiv 2401.10774.

    Args:
        hidden: width of the states.
        heads: how many.
        blocks: residual blocks of each.
    """

    def __init__(self, hidden: int, heads: int, blocks: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(MedusaHead(hidden, blocks) for _ in range(heads))

    def forward(self, states: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """States `[..., hidden]` to what the target's head reads for each of the first `count` heads, `[count, ..., hidden]`."""
        return torch.stack([head(states) for head in self.heads[:count]])

    @torch.no_grad()
    def begin(self) -> None:
        """Weights to train from: every head says what the target's own does."""
        for head in self.heads:
            for block in head.blocks:  # type: ignore[union-attr]
                nn.init.zeros_(block.weight)
                nn.init.zeros_(block.bias)
            nn.init.eye_(head.out.weight)  # type: ignore[union-attr,arg-type]
