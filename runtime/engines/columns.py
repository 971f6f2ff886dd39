"""Which columns of a cache hold what: layers that see equally far have the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

HOLE = -1  # the place of what a column holds and nobody may see
_KINDS = {"full_attention", "sliding_attention"}


@dataclass(eq=False)
class Columns:
    """Layers whose caches have the same columns, since they see equally far.

    Attributes:
        kind: of attention, as configs say it.
        layers: their indices.
        window: tokens that each token sees, its own included; 0: all before it.
        places: int64 `[batch, columns]`: the position in its text of what a column holds, or `HOLE`.
    """

    kind: str
    layers: list[int]
    window: int
    places: torch.Tensor

    def visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Which columns tokens at `positions` `[batch, q]` see: bool `[batch, q, columns]`."""
        places = self.places[:, None]
        seen = (places >= 0).expand(-1, positions.shape[1], -1)
        return seen & (places > positions[:, :, None] - self.window) if self.window else seen

    def needed(self, lengths: Sequence[int]) -> int:
        """Columns that would do, for texts of these lengths."""
        return max(min(length, self.window or length) for length in lengths)


def columns(config: Any) -> list[Columns] | str:
    """The kinds of layers of a text config, with no column yet; or what is against them."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    named = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and not named:
        named = {"chunked_attention"}
    if named - _KINDS:
        kinds = ", ".join(sorted(named - _KINDS))
        return f"has layers of {kinds}, whose caches cannot hold the branches of a draft"
    empty = torch.zeros(0, 0, dtype=torch.int64)
    found: dict[int, Columns] = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"caches with {type(layer).__name__}, which cannot hold the branches of a draft"
        window = int(getattr(layer, "sliding_window", 0))
        kind = "sliding_attention" if window else "full_attention"
        found.setdefault(window, Columns(kind, [], window, empty)).layers.append(index)
    if len(found) - (0 in found) > 1:
        return "has layers with sliding windows of several sizes"
    return list(found.values())


def gathered(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The columns `index` `[batch, n]` of keys or values `[batch, heads, columns, size]`."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
