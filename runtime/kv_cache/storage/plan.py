"""Storage plan of a cache: tokens kept as floats, and the codecs of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.config.settings import Natural, Settings, Share
from runtime.kv_cache.clusters import Clusters
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.scores.base import Score
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.plain import Plain


@dataclass(frozen=True)
class Tier(Settings):
    """One way to store older tokens.

    Attributes:
        keys: codec of keys.
        values: codec of values.
        share: of the older tokens, the best by score first, in (0, 1]; over all tiers they add up to 1.
    """

    keys: Codec = field(default_factory=Plain)
    values: Codec = field(default_factory=Plain)
    share: Share = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether its tokens stay floats."""
        return self.keys.name == self.values.name == "plain"


@dataclass(frozen=True)
class StoragePlan(Settings):
    """Storage of tokens once they are no longer recent.

    Attributes:
        tiers: none: all tokens stay floats. Several: the best tokens by `saliency` go to the first, and so on.
        recent: newest tokens that stay floats.
        prefix: first tokens of a sequence that stay floats, and are never evicted.
        saliency: what tokens are ordered by where there are several tiers.
        clusters: how older tokens are merged before they are stored; None: they are not.
        floats: dtype of tokens that stay floats; None: the model's.
    """

    tiers: tuple[Tier, ...] = ()
    recent: Natural = 128
    prefix: Natural = 0
    saliency: Score | None = None
    clusters: Clusters | None = None
    floats: torch.dtype | None = None

    @property
    def chunk(self) -> int:
        """Tokens that leave the recent ones together."""
        return self.clusters.chunk if self.clusters else PAGE * (4 if len(self.tiers) > 1 else 1)

    @property
    def is_final(self) -> bool:
        """Whether stored tokens cannot be told apart any more: centroids stand for many, and tiers have no common order.

        A sequence's first chunk is evicted from before it is stored; of later chunks everything stays.
        """
        return self.clusters is not None or len(self.tiers) > 1

    @property
    def moves(self) -> bool:
        """Whether tokens change their storage at all."""
        return bool(self.tiers or self.prefix or self.clusters)
