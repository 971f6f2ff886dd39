"""Name of the argument by which a transformers model takes its KV cache: `cache` from 5.24 on, `past_key_values` before."""

from __future__ import annotations

import inspect
from typing import Any

CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(module: Any) -> str:
    """The name, which its output has too; empty where the model takes no cache of keys and values."""
    accepted = inspect.signature(module.forward).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in accepted), "")
    layers = getattr(module.config.get_text_config(), "layer_types", None)
    # State-space models (Mamba) have no keys and values; from 5.24 on they take their states as `cache` too.
    return "" if name == "cache" and layers and set(layers) == {"linear_attention"} else name
