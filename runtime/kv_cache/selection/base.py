"""Interface of a selection: the cache stays whole, and a decoding step reads a part of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.region import Chosen, Region
from runtime.kv_cache.selection.reads import Reads

#: The dataclass of a selection's options, whose fields are the recipe's.
Options = TypeVar("Options")


@dataclass(frozen=True)
class Queries:
    """The queries of one layer and step, and how attention makes scores of them.

    Attributes:
        states: `[batch * kv_heads, groups * count, size]`, query heads of a key head together.
        count: new tokens of this step, whose keys are in the tail already.
        scale: of the scores.
        softcap: 0: none; else scores become softcap * tanh(scores / softcap), before any bias (Gemma 2).
        counted: bool `[batch * kv_heads, groups * count]`, False where a query is padding (on the left of a row's new tokens); None:
            none is.
    """

    states: torch.Tensor
    count: int
    scale: float
    softcap: float = 0.0
    counted: torch.Tensor | None = None

    @property
    def later(self) -> torch.Tensor | int:
        """How many tokens of this step came after its first, int64 `[batch * kv_heads]` where rows differ."""
        if self.counted is None:
            return self.count - 1
        return (self.counted[:, : self.count].sum(1) - 1).clamp(min=0)

    def first(self) -> Queries:
        """Those of the step's first token alone: the only one that is no draft, and stays whatever is taken back of the step.

        (Of a row that is all padding, those of the last.)
        """
        if self.count == 1:
            return self
        states = self.states.unflatten(1, (-1, self.count))
        if self.counted is None:
            return replace(self, states=states[:, :, 0], count=1)
        place = (self.count - 1 - self.later)[:, None, None, None].expand(-1, states.shape[1], 1, states.shape[3])  # type: ignore[index]
        return replace(self, states=states.gather(2, place)[:, :, 0], count=1, counted=None)

    def votes(self, logits: torch.Tensor) -> torch.Tensor:
        """Attention of all queries of a row to each token, summed, float32 `[rows, n]`; `logits` are `[rows, groups * count, n]`."""
        weights = logits.softmax(-1)
        if self.counted is not None:
            weights = weights.masked_fill(~self.counted.unsqueeze(-1), 0.0)
        return weights.sum(1)

    def highest(self, scores: torch.Tensor) -> torch.Tensor:
        """The largest that any query of a row gives, `[rows, n]`; `scores` are `[rows, groups * count, n]`."""
        if self.counted is not None:
            scores = scores.masked_fill(~self.counted.unsqueeze(-1), float("-inf"))
        return scores.amax(1)

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """What attention makes of products of queries and keys, any shape; biases come after."""
        scores = products * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def rows(self, which: torch.Tensor) -> Queries:
        """Those of the rows `which` (int64) alone."""
        return replace(self, states=self.states[which], counted=None if self.counted is None else self.counted[which])


class Selection(ABC, Generic[Options]):
    """One method at work in one cache. A file each in this folder, with the dataclass of its options.

    Args:
        options: the recipe's.
        layers: how many.

    Attributes:
        reads: what steps read.
    """

    def __init__(self, options: Options, layers: int) -> None:
        self.options, self.reads = options, Reads(layers)

    def choose(self, layer: LayerState, queries: Queries, regions: list[Region]) -> list[Chosen | None]:
        """What this step reads of each region; None: all of it.

        Called once a layer and step, in the order of layers, after the step's tokens were appended to the tail.

        Args:
            layer: `index`, `shape` (batch, kv_heads), `changes`: when that has grown, places known from before are void, and
                `taken_back`: when that has grown, they are from so many places before the end on.
            queries: the step's.
            regions: in order of arrival, the tail last.

        Raises:
            ValueError: what the layer holds does not go with the method.
        """
        chosen = self._choose(layer, queries, regions)
        self.reads.add(layer.index, regions, chosen)
        return chosen

    @abstractmethod
    def _choose(self, layer: LayerState, queries: Queries, regions: list[Region]) -> list[Chosen | None]:
        """As `choose`."""

    @abstractmethod
    def nbytes(self, index: int) -> int:
        """Memory of what is kept beside layer `index`'s cache, as allocated."""
