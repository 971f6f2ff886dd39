"""What storage a cache has: which tokens are held as floats, and how the others are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.config.ranges import SHARE, bounded, check_bounds
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.storage.base import Codec

if TYPE_CHECKING:
    from runtime.kv_cache.clusters import Clusters
    from runtime.kv_cache.scores.base import Score


@dataclass(frozen=True)
class Tier:
    """One way to hold older tokens.

    Attributes:
        keys: codec of keys.
        values: codec of values.
        share: of the older tokens, the best by score first, in (0, 1]; over all tiers they add up to 1.
    """

    keys: Codec
    values: Codec
    share: float = bounded(1.0, SHARE)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class StoragePlan:
    """How tokens are held once they are no longer recent.

    Attributes:
        tiers: none: all tokens stay floats. Several: the best tokens by `saliency` go to the first, and so on.
        recent: newest tokens that stay floats.
        prefix: first tokens of a sequence that stay floats, and are never evicted.
        saliency: what tokens are ordered by where there are several tiers.
        clusters: how older tokens are merged before they are stored; None: they are not.
        floats: what tokens that stay floats are held in; None: the model's dtype.
    """

    tiers: tuple[Tier, ...] = ()
    recent: int = 128
    prefix: int = 0
    saliency: Score | None = None
    clusters: Clusters | None = None
    floats: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def chunk(self) -> int:
        """Tokens that leave the recent ones together."""
        return self.clusters.chunk if self.clusters else PAGE * (4 if len(self.tiers) > 1 else 1)

    @property
    def is_final(self) -> bool:
        """Whether stored tokens cannot be told apart any more: centroids stand for many, and tiers have no common order.

        A text's first piece is evicted from before it is stored; of later pieces everything stays.
        """
        return self.clusters is not None or len(self.tiers) > 1

    @property
    def moves(self) -> bool:
        """Whether tokens change their storage at all."""
        return bool(self.tiers or self.prefix or self.clusters)
