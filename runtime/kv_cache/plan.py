"""Plan of a cache: what is evicted, how the rest is stored, what a step reads, where it lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.storage.plan import StoragePlan

if TYPE_CHECKING:
    from runtime.kv_cache.offload import OffloadPlan
    from runtime.kv_cache.selection.base import Budget


@dataclass(frozen=True)
class CachePlan:
    """What a cache does; each axis is independent of the others. None: nothing of that kind."""

    eviction: EvictionPlan | None = None
    storage: StoragePlan = field(default_factory=StoragePlan)
    selection: Budget | None = None
    offload: OffloadPlan | None = None
