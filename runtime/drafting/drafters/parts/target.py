"""What heads use of their target: its embedding and its head, in the target's own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runtime.drafting.config.target import UnfitError
from runtime.drafting.drafters.parts.lean import compute_dtype, lean_linear
from runtime.layers.compressed_linear import CompressedLinear


@dataclass
class TargetParts:
    """Of a loaded target.

    Attributes:
        embedding: ids to `[..., hidden]`. head: hidden states, after the final norm, to logits.
        hidden: width of the hidden states. vocabulary: ids are below it.
        device: where both are. dtype: that drafts are computed in.
    """

    embedding: nn.Module
    head: nn.Module
    hidden: int
    vocabulary: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, engine: Any, where: str = "drafter") -> TargetParts:
        """Those of an engine; UnfitError where it does not show them."""
        module: Any = getattr(engine, "module", None)
        head = None if module is None else module.get_output_embeddings()
        if head is None or not hasattr(head, "in_features"):
            raise UnfitError((), f"{engine.description} shows no head and no embedding, which heads need", where)
        dtype = compute_dtype(engine.device, _dtype(head))
        return cls(module.get_input_embeddings(), head, head.in_features, engine.vocab_size, engine.device, dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` in `dtype`."""
        found: torch.Tensor = self.embedding(ids.to(self.device))
        return found.to(self.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 `[..., vocabulary]` of states `[..., hidden]`."""
        found: torch.Tensor = self.head(states.to(_dtype(self.head)))
        return found[..., : self.vocabulary].float()

    def rows(self, kept: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's weight `[k, hidden]`, dense, and bias `[k]`, of these tokens, int64 `[k]`; None: of all ids."""
        head: Any = self.head
        weight = head.dequantize() if isinstance(head, CompressedLinear) else head.weight
        chosen = slice(self.vocabulary) if kept is None else kept.to(weight.device)
        return weight.detach()[chosen], None if head.bias is None else head.bias.detach()[chosen]

    def head_of(self, kept: torch.Tensor) -> nn.Module:
        """A layer of these tokens' rows alone, `[..., hidden]` in `dtype` to `[..., k]`."""
        weight, bias = self.rows(kept)
        return lean_linear(weight, bias, self.dtype, self.device)


def _dtype(layer: nn.Module) -> torch.dtype:
    if isinstance(layer, CompressedLinear):
        return layer.dtype
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.dtype
