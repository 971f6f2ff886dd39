"""Transformers models without some of their attention and feed-forward halves: what parts of the decoder in C are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class NoAttention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoFeedForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def without(module: Any, attention: Sequence[int], mlp: Sequence[int]) -> Any:
    """The transformers model with these halves taken out, in place."""
    for layer in attention:
        module.model.layers[layer].self_attn = NoAttention()
    for layer in mlp:
        module.model.layers[layer].mlp = NoFeedForward()
    return module
