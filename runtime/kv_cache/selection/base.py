"""What a selection is: the cache is kept whole, and a decoding step reads a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from runtime.kv_cache.region import Chosen, Region

if TYPE_CHECKING:
    from runtime.kv_cache.layer import CompressedLayer


class Selection(Protocol):
    """One method at work in one cache. A file each in this folder, with the dataclass of its options, whose fields are the recipe's.

    Attributes:
        name: in recipes.
    """

    name: ClassVar[str]

    def choose(
        self, layer: CompressedLayer, query: torch.Tensor, regions: list[Region], scale: float
    ) -> list[Chosen | None]:
        """What this step reads of each region; None: all of it.

        Called once a layer and step, in the order of layers, after the step's tokens were appended to the tail.

        Args:
            layer: `index`, `shape` (batch, kv_heads) and `changes`: when that has grown, places known from before are void.
            query: `[batch * kv_heads, groups * q, size]`, query heads of a key head together.
            regions: in order of arrival, the tail last.
            scale: of the scores.
        """

    def nbytes(self, index: int) -> int:
        """Memory of what is kept beside layer `index`'s cache, as allocated."""
