"""KV-cache compression: score (which tokens matter) x budget (how many a head keeps) x storage (how they are stored) x selection
(which of them a step reads)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.kv_cache.cache import CompressedCache, prepare
    from runtime.kv_cache.policy.policy import Policy

__all__ = ["CompressedCache", "Policy", "prepare"]

# Found when asked for: the cache needs transformers, which command lines that only read policies do without.
_PLACES = {"CompressedCache": "cache", "Policy": "policy.policy", "prepare": "cache"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
