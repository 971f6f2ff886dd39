"""Sizes of a decoder that an engine's profiles need: numbers, so that they can lie in a bundle's build.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.source import Source

HEAD = 256  # channels of a head that TensorRT's Attention takes at most


@dataclass(frozen=True)
class DecoderModel:
    """A decoder's sizes.

    Attributes:
        layers, kv_heads, head_dim, vocabulary: numbers of layers, key heads, channels of a head, tokens.
        context: most positions; None when the configuration has no limit.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None


def read_model(source: Source) -> DecoderModel:
    """The sizes of an artifact's model, from its configuration and skeleton."""
    config: Any = source.config.get_text_config()
    heads = int(config.num_attention_heads)
    return DecoderModel(
        int(config.num_hidden_layers),
        int(getattr(config, "num_key_value_heads", None) or heads),
        int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        int(source.skeleton.get_output_embeddings().out_features),  # type: ignore[union-attr, arg-type]
        getattr(config, "max_position_embeddings", None),
    )
