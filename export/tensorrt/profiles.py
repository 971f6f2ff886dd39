"""Sizes of a decoder, limits of its engine, and the shapes it is built for: a profile to read prompts, one to write tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from export.tensorrt.options import TensorrtOptions
from runtime.errors import RequestError

if TYPE_CHECKING:
    from export.source import Source

Shape = tuple[int, ...]
Range = tuple[Shape, ...]  # least, optimum, most
HEAD = 256  # channels of a head that TensorRT's Attention takes at most


@dataclass(frozen=True)
class DecoderModel:
    """A decoder's sizes, which a bundle's build.json holds.

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


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine; see the options of the same names."""

    max_batch: int
    max_length: int
    max_prompt: int
    optimum_batch: int
    optimum_prompt: int


def limits(options: TensorrtOptions, model: DecoderModel) -> Limits:
    """The options' limits; those left at their defaults are cut to what they may not exceed.

    Raises:
        RequestError: they contradict each other or the model.
    """
    size = {field.name: getattr(options, field.name) for field in fields(Limits)}
    bounds = {"max_prompt": "max_length", "optimum_prompt": "max_prompt", "optimum_batch": "max_batch"}
    for name in ("max_length", *bounds):
        bound = bounds.get(name, "the model's context")
        most = size.get(bound, model.context)
        if most is not None and size[name] > most:
            if name in options.model_fields_set:
                raise RequestError(f"option {name} is {size[name]}, more than {bound}, which is {most}")
            size[name] = most
    return Limits(**size)


def profiles(model: DecoderModel, size: Limits) -> list[dict[str, Range]]:
    """{input: shapes} of prefill and decode. The mask is as long as past and sequence together in each of the three shapes,
    because TensorRT holds dimensions of one name equal."""
    steps = (
        # sequence: least, optimum, most; past: least, optimum, most
        ((1, size.optimum_prompt, size.max_prompt), (0, 0, size.max_length - size.max_prompt)),
        ((1, 1, 1), (1, min(size.optimum_prompt, size.max_length - 1), size.max_length - 1)),
    )
    result = []
    for sequence, past in steps:
        rows = tuple(zip((1, size.optimum_batch, size.max_batch), sequence, past, strict=True))
        tokens = tuple((batch, new) for batch, new, _ in rows)
        cached = tuple((batch, model.kv_heads, old, model.head_dim) for batch, _, old in rows)
        profile: dict[str, Range] = {"input_ids": tokens, "position_ids": tokens}
        profile["attention_mask"] = tuple((batch, new + old) for batch, new, old in rows)
        for layer in range(model.layers):
            profile |= {f"past_key_values.{layer}.{kind}": cached for kind in ("key", "value")}
        result.append(profile)
    return result
