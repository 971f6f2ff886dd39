"""What a selection is: the cache is kept whole, and a decoding step reads a part of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from runtime.kv_cache.region import Chosen, Region
from runtime.kv_cache.selection.reads import Reads

if TYPE_CHECKING:
    from runtime.kv_cache.layer import CompressedLayer

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
    """

    states: torch.Tensor
    count: int
    scale: float
    softcap: float = 0.0

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """What attention makes of products of queries and keys, any shape; biases come after."""
        scores = products * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def rows(self, which: torch.Tensor) -> Queries:
        """Those of the rows `which` (int64) alone."""
        return replace(self, states=self.states[which])


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

    def choose(self, layer: CompressedLayer, queries: Queries, regions: list[Region]) -> list[Chosen | None]:
        """What this step reads of each region; None: all of it.

        Called once a layer and step, in the order of layers, after the step's tokens were appended to the tail.

        Args:
            layer: `index`, `shape` (batch, kv_heads) and `changes`: when that has grown, places known from before are void.
            queries: the step's.
            regions: in order of arrival, the tail last.

        Raises:
            ValueError: what the layer holds does not go with the method.
        """
        chosen = self._choose(layer, queries, regions)
        self.reads.add(layer.index, regions, chosen)
        return chosen

    @abstractmethod
    def _choose(self, layer: CompressedLayer, queries: Queries, regions: list[Region]) -> list[Chosen | None]:
        """As `choose`."""

    @abstractmethod
    def nbytes(self, index: int) -> int:
        """Memory of what is kept beside layer `index`'s cache, as allocated."""
