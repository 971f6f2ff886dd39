"""A model's config layer by layer: layers may differ in heads and head sizes (Gemma 4)."""

from __future__ import annotations

from typing import Any


def layer_configs(text: Any) -> list[Any]:
    """One config for each layer of a text config, the same one where all layers are alike.

    transformers before 5.17 or so has no `per_layer_config`, and no models whose layers differ in these.
    """
    parts = getattr(text, "per_layer_config", None)
    return [text] * int(text.num_hidden_layers) if parts is None else list(parts)
