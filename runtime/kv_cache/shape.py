"""Shape of a model's cache: heads, channels and dtypes, layer by layer, from its config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.modeling.layer_sizes import KEY, overrides, uniform

# A model's config layer by layer: layers may differ in heads and head sizes (Gemma 4).


def layer_configs(text: Any) -> list[Any]:
    """One config for each layer of a language model's config, the same one where all layers are alike.

    A transformers that does not know `per_layer_config` (before 5.17 or so) holds it as it stands in config.json.
    """
    parts = getattr(text, KEY, None)
    if parts is None:
        return [text] * int(text.num_hidden_layers)
    if hasattr(type(text), KEY):
        return list(parts)
    layers = overrides(text)
    return [uniform(text, **layers.get(i, {})) for i in range(int(text.num_hidden_layers))]


_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class LayerShape:
    """What decides the size of one layer's cache.

    Attributes:
        heads: key heads.
        sizes: channels of a key and of a value.
        query_heads: for queries that scores remember.
        dtype: of queries, keys and values as they come.
        window: tokens that it has at most; None: all of them.
        floats: dtype of tokens that stay floats; None: as they come.
        hidden: width of the attention module's inputs.
    """

    heads: int
    sizes: tuple[int, int]
    query_heads: int
    dtype: torch.dtype
    window: int | None = None
    floats: torch.dtype | None = None
    hidden: int = 0

    @property
    def held(self) -> torch.dtype:
        """Dtype of tokens that stay floats."""
        return self.floats or self.dtype

    @property
    def token(self) -> int:
        """Bytes of a token as floats."""
        return self.heads * sum(self.sizes) * self.held.itemsize

    def whole(self, tokens: int) -> int:
        """Bytes of so many tokens in an uncompressed cache."""
        return self.token * (tokens if self.window is None else min(tokens, self.window))


@dataclass(frozen=True)
class Shape:
    """What of a model decides the size of its cache; layers may differ (Gemma 4). Recurrent states, which do not grow, are not in it.

    Attributes:
        layers: with full attention, which a policy is about.
        others: with attention, but of a window.
    """

    layers: tuple[LayerShape, ...]
    others: tuple[LayerShape, ...] = ()

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Shape:
        """Of a model's config."""
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ()
        parts = layer_configs(text)
        layers = compressed_layers(text)
        others = []
        for index, (kind, part) in enumerate(zip(kinds, parts, strict=False)):
            if kind in _WINDOWED and index not in layers:
                window = getattr(part, "sliding_window", None) or getattr(part, "attention_chunk_size", None)
                others.append(replace(_layer(part, dtype), window=window))
        return cls(tuple(_layer(parts[index], dtype) for index in layers), tuple(others))


def _layer(config: Any, dtype: torch.dtype) -> LayerShape:
    queries = int(config.num_attention_heads)
    heads = int(getattr(config, "num_key_value_heads", None) or queries)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // queries)
    return LayerShape(heads, (size, size), queries, dtype, hidden=int(getattr(config, "hidden_size", 0)))


def compressed_layers(config: Any) -> list[int]:
    """Indices of the layers that are compressed: those with full attention, as transformers tells them apart."""
    from transformers.cache_utils import DynamicCache, DynamicLayer  # not what a load without a policy should wait for

    return [index for index, layer in enumerate(DynamicCache(config=config).layers) if type(layer) is DynamicLayer]
