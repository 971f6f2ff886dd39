"""A model's config layer by layer: layers may differ in heads and head sizes (Gemma 4)."""

from __future__ import annotations

from typing import Any

from runtime.layer_sizes import KEY, overrides, uniform


def layer_configs(text: Any) -> list[Any]:
    """One config for each layer of a text config, the same one where all layers are alike.

    A transformers that does not know `per_layer_config` (before 5.17 or so) holds it as it stands in config.json.
    """
    parts = getattr(text, KEY, None)
    if parts is None:
        return [text] * int(text.num_hidden_layers)
    if hasattr(type(text), KEY):
        return list(parts)
    layers = overrides(text)
    return [uniform(text, **layers.get(i, {})) for i in range(int(text.num_hidden_layers))]
