"""Shapes that an engine is built for: one profile to read prompts, one to write token after token."""

from __future__ import annotations

from dataclasses import dataclass

from export.tensorrt.model import DecoderModel
from export.tensorrt.options import TensorrtOptions
from runtime.errors import RequestError

Shape = tuple[int, ...]
Range = tuple[Shape, Shape, Shape]  # least, optimum, most


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine; see the options of the same names."""

    max_batch: int
    max_length: int
    max_prompt: int
    optimum_batch: int
    optimum_prompt: int


def limits(options: TensorrtOptions, model: DecoderModel) -> Limits:
    """The options' limits, cut to the model's context where they are defaults, and checked.

    Raises:
        RequestError: they contradict each other or the model.
    """
    given = options.model_fields_set
    context = model.context
    length = options.max_length
    if context is not None and length > context:
        if "max_length" in given:
            raise RequestError(f"option max_length is {length}, and the model's context holds {context} tokens")
        length = context
    prompt = options.max_prompt
    if prompt > length:
        if "max_prompt" in given:
            raise RequestError(f"option max_prompt is {prompt}, more than max_length, which is {length}")
        prompt = length
    optimum_prompt = options.optimum_prompt
    if optimum_prompt > prompt:
        if "optimum_prompt" in given:
            raise RequestError(f"option optimum_prompt is {optimum_prompt}, more than max_prompt, which is {prompt}")
        optimum_prompt = prompt
    if options.optimum_batch > options.max_batch:
        raise RequestError(
            f"option optimum_batch is {options.optimum_batch}, more than max_batch, which is {options.max_batch}"
        )
    return Limits(options.max_batch, length, prompt, options.optimum_batch, optimum_prompt)


def profiles(model: DecoderModel, size: Limits) -> list[dict[str, Range]]:
    """{input: shapes} of prefill and decode, for the ONNX graph. The mask is as long as past and sequence together in each of the
    three shapes, because TensorRT holds dimensions of one name equal."""
    best, most = size.optimum_batch, size.max_batch
    steps = (
        # sequence: least, optimum, most; past: least, optimum, most
        ((1, size.optimum_prompt, size.max_prompt), (0, 0, size.max_length - size.max_prompt)),
        ((1, 1, 1), (1, min(size.optimum_prompt, size.max_length - 1), size.max_length - 1)),
    )
    result = []
    for sequence, past in steps:
        batches = (1, best, most)

        def ranged(tail: tuple[Shape, Shape, Shape], batches: Shape = batches) -> Range:
            shapes = [(rows, *rest) for rows, rest in zip(batches, tail, strict=True)]
            return shapes[0], shapes[1], shapes[2]

        tokens = ranged(((sequence[0],), (sequence[1],), (sequence[2],)))
        profile: dict[str, Range] = {"input_ids": tokens, "position_ids": tokens}
        both = [s + p for s, p in zip(sequence, past, strict=True)]
        profile["attention_mask"] = ranged(((both[0],), (both[1],), (both[2],)))
        cached = [(model.kv_heads, p, model.head_dim) for p in past]
        for layer in range(model.layers):
            for kind in ("key", "value"):
                profile[f"past_key_values.{layer}.{kind}"] = ranged((cached[0], cached[1], cached[2]))
        result.append(profile)
    return result
