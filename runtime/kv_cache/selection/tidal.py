"""TidalDecode: few layers read everything and choose tokens, which the layers after them read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Natural
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.region import Chosen, Queries
from runtime.kv_cache.selection.base import Budget, Selection
from runtime.kv_cache.selection.layout import Layout, with_ends
from runtime.kv_cache.shape import Shape


@dataclass(frozen=True)
class Tidal(Budget):
    """Neighbouring layers want the same tokens (TidalDecode, arXiv 2410.05076).

    Attributes:
        full_layers: first layers, which read everything and choose nothing.
        select_layers: those that read everything and choose the tokens with most attention, summed over heads, for the layers up to
            the next of them; None: the first behind the full ones, and the one in the middle.
        recent: newest tokens, which are always read.
    """

    name: ClassVar[str] = "tidal"
    needs_aligned: ClassVar[bool] = True
    full_layers: Natural = 2
    select_layers: tuple[Natural, ...] | None = None
    recent: Natural = 32

    def check_shape(self, shape: Shape) -> None:
        self.selecting(len(shape.layers))

    def begin(self, layers: int) -> TidalSelection:
        """Raises ValueError where a layer that chooses is not there, or among the full ones."""
        return TidalSelection(self, layers)

    def selecting(self, layers: int) -> tuple[int, ...]:
        """Layers that choose, of so many, ascending."""
        if self.select_layers is None:
            wanted = {self.full_layers, max(self.full_layers, layers // 2)}
            return tuple(sorted(index for index in wanted if index < layers))
        wrong = [index for index in self.select_layers if not self.full_layers <= index < layers]
        if wrong:
            raise ValueError(
                f"{self.name}.select_layers has {wrong[0]}; of {layers} layers, the first {self.full_layers} full, "
                f"those from {self.full_layers} to {layers - 1} are allowed"
            )
        return tuple(sorted(set(self.select_layers)))


class TidalSelection(Selection[Tidal]):
    """Tokens that layers of one cache choose for those after them.

    Attributes:
        selecting: layers that choose.
    """

    def __init__(self, options: Tidal, layers: int) -> None:
        super().__init__(options, layers)
        self.selecting = options.selecting(layers)
        self._chosen: tuple[int, Chosen, torch.Tensor] | None = None  # by which layer; what; of how many tokens

    def nbytes(self, index: int) -> int:
        return self._chosen[1].nbytes if self._chosen is not None and self._chosen[0] == index else 0

    def _choose(self, layer: LayerState, queries: Queries, layout: Layout) -> list[Chosen | None] | None:
        if not self.selecting or layer.index < self.selecting[0]:
            return None
        if layer.index in self.selecting:
            # For the layers to come.
            lengths, recent = self._sequences(layer, layout), max(self.options.recent, queries.count)
            votes = queries.votes(layout.logits(queries)).view(*layer.shape, -1).sum(1)
            picked = self.options.pick(votes, lengths, layout.longest, 0, recent)
            self._chosen = layer.index, with_ends(picked, lengths, 0, recent), lengths
            return None
        if self._chosen is None:
            return None
        by, picked, lengths = self._chosen
        if self._aligned[layer.index] != layer.changes and not torch.equal(self._sequences(layer, layout), lengths):
            self._aligned[layer.index] = None
            text = f"but layer {layer.index} holds other numbers of them than layer {by}"
            text = f"{self.options.name} reads the same tokens in all layers, {text}"
            raise ValueError(f"{text}: evict nothing, or the same tokens in all layers")
        return layout.chosen(picked.per_head(layer.shape[1]))
