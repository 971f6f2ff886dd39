"""Limits of drafts over a compressed cache: the policies, and the numbers of tokens, with which a sequence that is verified several
tokens at a time is the one that plain decoding writes.

A layer evicts and stores at certain numbers of tokens. Up to the next of them tokens are computed from the same cache whether they
come together or one by one; so a pass must not go beyond it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kv_cache.layer import STEP_TOKENS, CompressedLayer

if TYPE_CHECKING:
    from runtime.kv_cache.cache import CompressedCache
    from runtime.kv_cache.plan import CachePlan


def why_not(plan: CachePlan) -> str | None:
    """Why drafts cannot be verified over a cache of this plan; None: they can."""
    if plan.selection is not None:
        return "what a step reads of it is chosen for all tokens of the step together, so that a draft would change the tokens"
    if plan.eviction is not None and plan.eviction.interval == 1:
        return "it evicts after every token, so that a draft would change the tokens; set its interval to 2 or more"
    return None


def room(cache: CompressedCache) -> int:
    """How many tokens after the next one can be verified with it, each as it would be alone."""
    least = STEP_TOKENS - 1
    for layer in cache.compressed:
        if layer.is_initialized:
            least = min(least, _until_evicted(layer), _until_stored(layer))
    return max(0, least)


def _until_evicted(layer: CompressedLayer) -> int:
    interval = None if layer.eviction is None else layer.eviction.plan.interval
    return STEP_TOKENS if interval is None else interval - 1 - layer.generated % interval


def _until_stored(layer: CompressedLayer) -> int:
    storage, store = layer.storage, layer.store
    if not store.tiers:
        return STEP_TOKENS
    # What was put off is stored when the next pass begins. What is evicted then too is not known before.
    leaves = (store.tail.counts - storage.recent).clamp(min=0) // storage.chunk * storage.chunk
    if bool(leaves.any()) and layer.eviction is not None and layer.eviction.plan.interval is not None:
        return 0
    return storage.recent + storage.chunk - 1 - int((store.tail.counts - leaves).max())
