"""Cache policies that pages of a fused engine can hold, whichever engine it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy

LANES = 16
"""Channels that share a grid, or a head, are a multiple of it: a vector of codes (kv_page.h)."""


def why_not_pages(policy: Policy) -> str | None:
    """What a policy says of older tokens that no page of a fused engine can hold so; None: they can."""
    for what, given in (
        ("merge tokens", policy.clusters),
        ("hold tokens in several tiers", len(policy.tiers) > 1),
    ):
        if given:
            return what
    for key, axis in (("keys", "channel"), ("values", "token")):
        codec = getattr(policy.tiers[0], key) if policy.tiers else Plain()
        if isinstance(codec, Integer) and (codec.axis != axis or codec.group % LANES):
            return f"store {key} on grids a {codec.axis}" + (f" of {codec.group} channels" if codec.group else "")
        if not isinstance(codec, (Plain, Integer, Float8)):
            return f"store {key} as {codec.name}"
    return None
