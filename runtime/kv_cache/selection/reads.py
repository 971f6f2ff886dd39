"""Share of the cache that steps have read."""

from __future__ import annotations

import torch

from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Region


class Reads:
    """Counts tokens that attention steps read, and those they could have read, layer by layer; numbers stay on the device.

    Args:
        layers: how many.
    """

    def __init__(self, layers: int) -> None:
        self._read: list[torch.Tensor | int] = [0] * layers
        self._held: list[torch.Tensor | int] = [0] * layers

    def add(self, layer: int, regions: list[Region], chosen: list[Chosen | None]) -> None:
        """One step of one layer."""
        for region, some in zip(regions, chosen, strict=True):
            held = region.lengths.sum()
            self._held[layer] = self._held[layer] + held
            self._read[layer] = self._read[layer] + (held if some is None else tokens_of(region, some).sum())

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens read and tokens held, of all layers and steps."""
        return sum(map(int, self._read)), sum(map(int, self._held))

    def share(self, layer: int | None = None) -> float:
        """Of the tokens held, those read, of one layer or all (every layer's token counts the same); 1 before the first step."""
        layers = range(len(self._held)) if layer is None else [layer]
        held = sum(int(self._held[index]) for index in layers)
        return sum(int(self._read[index]) for index in layers) / held if held else 1.0


def tokens_of(region: Region, chosen: Chosen) -> torch.Tensor:
    """Tokens of each row that were chosen, int64 `[rows]`."""
    if chosen.unit == 1:
        return chosen.counts
    counted = torch.arange(chosen.index.shape[1], device=chosen.index.device) < chosen.counts[:, None]
    tokens = (region.lengths[:, None] - PAGE * chosen.index).clamp(0, PAGE)
    return (tokens * counted).sum(1)
