"""A Llama-like decoder over packed rows: tokens of any sequences side by side, no batch dimension, no padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from runtime.engines.cuda.cache import Memory, Rows
from runtime.engines.cuda.ops import Ops
from runtime.engines.cuda.parts import Parts

#: Block number and queries `[rows, heads, head_dim]` -> what they find in the cache, the same shape.
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class Decoder:
    """The forward pass. Linear layers are called as modules, what lies between them as `ops`.

    Attributes:
        embeds: whether `embed` may be captured in a graph.
    """

    def __init__(self, parts: Parts, ops: Ops, positions: int) -> None:
        self.parts = parts
        self.ops = ops
        self.rotations = torch.cat(parts.rotation(positions), dim=-1)
        self.embeds = type(parts.embedding) is nn.Embedding

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]`."""
        return self.parts.embedding(ids).to(self.parts.dtype)

    def __call__(
        self, hidden: torch.Tensor, rows: Rows, memory: Memory, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Keys and values of all rows are written; logits `[rows or wanted, vocabulary]` in the model's dtype.

        Args:
            hidden: `embed(rows.ids)`.
            wanted: indices of the rows whose logits are computed; None: all.
        """
        return self.parts.head(self.states(hidden, rows, memory, attend, wanted))

    def states(
        self, hidden: torch.Tensor, rows: Rows, memory: Memory, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As a call, but what the head reads: `[rows or wanted, hidden]`."""
        parts, norm = self.parts, self.ops.rms_norm
        x, residual = norm(hidden, parts.blocks[0].input_norm, parts.eps)
        for i, block in enumerate(parts.blocks):
            q = self.ops.rotate_and_store(block.qkv(x), block.norms, parts.eps, self.rotations, rows, memory.layers[i])
            found = block.output(attend(i, q).reshape(x.shape[0], -1))
            x, residual = norm(found, block.mlp_norm, parts.eps, residual)
            found = block.down(self.ops.swiglu(block.gate_up.whole(x)))
            if i + 1 < len(parts.blocks):
                x, residual = norm(found, parts.blocks[i + 1].input_norm, parts.eps, residual)
        if wanted is not None:
            found, residual = found[wanted], residual[wanted]
        x, _ = norm(found, parts.final_norm, parts.eps, residual)
        return x
