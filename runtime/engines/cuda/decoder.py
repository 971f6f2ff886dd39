"""A Llama-like decoder over packed rows: tokens of any sequences side by side, no batch dimension, no padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from runtime.engines.cuda.cache import Memory, Rows
from runtime.engines.cuda.ops import Ops
from runtime.engines.llama_structure import FeedForward, Program, RoutedExperts

#: Block number and queries `[rows, heads, head_dim]` -> what they find in the cache, the same shape.
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class Decoder:
    """The forward pass. Linear layers are called as modules, what lies between them as `ops`.

    Attributes:
        embeds: whether `embed` may be captured in a graph.
    """

    def __init__(self, parts: Program, ops: Ops, positions: int) -> None:
        self.parts = parts
        self.ops = ops
        self.rotations = torch.cat(parts.rotation(positions), dim=-1)
        self.embeds = type(parts.embedding) is nn.Embedding

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]`."""
        return self.parts.embedding(ids).to(self.parts.dtype)

    def __call__(
        self, hidden: torch.Tensor, rows: Rows, memory: Memory, attend: Attend, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[rows or wanted, vocabulary]` and what the head reads of all rows, `[rows, hidden]`, both in the model's dtype.

        Keys and values of all rows are written.

        Args:
            hidden: `embed(rows.ids)`.
            wanted: indices of the rows whose logits are computed; None: all.
        """
        parts, norm = self.parts, self.ops.rms_norm
        x, residual = norm(hidden, parts.blocks[0].input_norm, parts.eps)
        for i, block in enumerate(parts.blocks):
            layer = memory.layers[i]
            q = self.ops.rotate_and_store(block.qkv(x), block.norms, parts.eps, self.rotations, rows.of(layer), layer)
            found = block.output(attend(i, q).reshape(x.shape[0], -1))
            x, residual = norm(found, block.mlp_norm, parts.eps, residual)
            found = self._feed_forward(block.mlp, x)
            if i + 1 < len(parts.blocks):
                x, residual = norm(found, parts.blocks[i + 1].input_norm, parts.eps, residual)
        x, _ = norm(found, parts.final_norm, parts.eps, residual)
        return parts.head(x if wanted is None else x[wanted]), x

    def _feed_forward(self, mlp: FeedForward | RoutedExperts, x: torch.Tensor) -> torch.Tensor:
        if isinstance(mlp, RoutedExperts):
            return self.ops.mixture(x, mlp)
        found: torch.Tensor = mlp.down(self.ops.swiglu(mlp.gate_up.whole(x)))
        return found
