"""What each layer does, with torch, as its documentation says; shapes and types follow from running it on empty memory ("meta")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

TORCH = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT8": torch.int8, "INT32": torch.int32, "INT64": torch.int64,
    "BOOL": torch.bool, "FP8": torch.float8_e4m3fn, "INT4": torch.int8,
}  # fmt: skip
FLOATS = {torch.float32, torch.float16, torch.bfloat16}


class RefusedError(AssertionError):
    """TensorRT's documentation forbids it."""


def want(condition: bool, layer: Any, what: str) -> None:
    if not condition:
        raise RefusedError(f"{layer._kind} {layer.name}: {what}")


def decode(kind: str, shape: tuple[int, ...], data: np.ndarray[Any, Any]) -> torch.Tensor:
    """A constant from its bytes; 4-bit codes come as int8."""
    raw = torch.from_numpy(data.copy())
    if kind == "INT4":
        low, high = (raw & 15).to(torch.int8), (raw >> 4).to(torch.int8)
        codes = torch.stack([low, high], -1).reshape(-1)[: int(np.prod(shape, dtype=np.int64))]
        return torch.where(codes > 7, codes - 16, codes).reshape(shape)
    return raw.view(TORCH[kind]).reshape(shape)


def run(layer: Any, inputs: Callable[[Any], torch.Tensor], constants: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """The layer's output.

    Args:
        inputs: value of a tensor. constants: value of a constant layer.
    """
    if layer._kind == "constant":
        return constants(layer)
    return globals()[f"_{layer._kind}"](layer, layer._arguments, inputs)


def _gather(layer: Any, a: Any, x: Any) -> torch.Tensor:
    data, indices = x(a["input"]), x(a["indices"])
    want(indices.dtype in (torch.int32, torch.int64), layer, "indices are integers")
    if layer.num_elementwise_dims:
        want(layer.num_elementwise_dims == 1 and a["axis"] == 1 and data.dim() == 3, layer, "one dimension goes along")
        return data.gather(1, indices.long()[..., None].expand(*indices.shape, data.shape[-1]))
    want(a["axis"] == 0, layer, "the stand-in gathers rows")
    return data[indices.long()] if data.device.type != "meta" else data.new_empty(*indices.shape, *data.shape[1:])


def _cast(layer: Any, a: Any, x: Any) -> torch.Tensor:
    return x(a["input"]).to(TORCH[a["to_type"].name])


def _elementwise(layer: Any, a: Any, x: Any) -> torch.Tensor:
    first, second = x(a["input1"]), x(a["input2"])
    want(first.dtype == second.dtype, layer, f"joins {first.dtype} and {second.dtype}")
    want(first.dim() == second.dim(), layer, f"joins ranks {first.dim()} and {second.dim()}")
    wide = torch.float32 if first.dtype in FLOATS else first.dtype
    function = {"SUM": torch.add, "PROD": torch.mul, "SUB": torch.sub, "DIV": torch.div}[a["op"].name]
    return function(first.to(wide), second.to(wide)).to(first.dtype)


def _unary(layer: Any, a: Any, x: Any) -> torch.Tensor:
    return {"SQRT": torch.sqrt, "RECIP": torch.reciprocal}[a["op"].name](x(a["input"]))


def _reduce(layer: Any, a: Any, x: Any) -> torch.Tensor:
    value = x(a["input"])
    want(
        a["op"].name == "AVG" and a["axes"] == 1 << (value.dim() - 1) and a["keep_dims"],
        layer,
        "averages the last dimension",
    )
    return value.mean(-1, keepdim=True)


def _activation(layer: Any, a: Any, x: Any) -> torch.Tensor:
    want(a["type"].name == "SIGMOID", layer, "is a sigmoid")
    value = x(a["input"])
    return value.float().sigmoid().to(value.dtype)


def _shuffle(layer: Any, a: Any, x: Any) -> torch.Tensor:
    value = x(a["input"])
    if layer.first_transpose is not None:
        value = value.permute(*layer.first_transpose)
    if layer.reshape_dims is not None:
        shape = [value.shape[i] if size == 0 else size for i, size in enumerate(layer.reshape_dims)]
        value = value.reshape(shape)
    if layer.second_transpose is not None:
        value = value.permute(*layer.second_transpose)
    return value


def _matrix_multiply(layer: Any, a: Any, x: Any) -> torch.Tensor:
    first, second = x(a["input0"]), x(a["input1"])
    want(first.dtype == second.dtype and first.dtype in FLOATS, layer, f"joins {first.dtype} and {second.dtype}")
    want(first.dim() == second.dim(), layer, f"joins ranks {first.dim()} and {second.dim()}")
    want(a["op0"].name == "NONE", layer, "the first matrix is not transposed")
    second = second.transpose(-1, -2) if a["op1"].name == "TRANSPOSE" else second
    return (first.float() @ second.float()).to(first.dtype)


def _dequantize(layer: Any, a: Any, x: Any) -> torch.Tensor:
    codes, scale, kind = x(a["input"]), x(a["scale"]), TORCH[a["output_type"].name]
    want(codes.dtype in (torch.int8, torch.float8_e4m3fn), layer, f"dequantizes {codes.dtype}")
    want(scale.dtype == kind, layer, f"scales of {scale.dtype} give {kind}")
    if scale.device.type != "meta":
        want(bool((scale > 0).all()), layer, "scales are positive")
    if scale.dim() == 1:
        want(scale.shape[0] == codes.shape[layer.axis], layer, "one scale a channel")
        scale = scale.reshape([-1 if i == layer.axis else 1 for i in range(codes.dim())])
    elif scale.dim() > 1:
        want(layer.axis == 0 and codes.shape[1:] == scale.shape[1:], layer, "one dimension has blocks")
        block, rest = divmod(codes.shape[0], scale.shape[0])
        want(rest == 0 and block in (64, 128), layer, f"blocks of {block}")
        scale = scale.repeat_interleave(block, 0)
    return (codes.float() * scale.float()).to(kind)


def _quantize(layer: Any, a: Any, x: Any) -> torch.Tensor:
    value, scale, kind = x(a["input"]), x(a["scale"]), a["output_type"].name
    want(scale.numel() == 1 and scale.dtype == value.dtype, layer, "activations have one scale, of their type")
    scaled = value.float() / scale.float().reshape(())
    if kind == "INT8":
        return scaled.round().clamp(-128, 127).to(torch.int8)
    want(kind == "FP8", layer, f"quantizes to {kind}")
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def _rotary_embedding(layer: Any, a: Any, x: Any) -> torch.Tensor:
    value, cosine, sine, places = x(a["input"]), x(a["cos_cache"]), x(a["sin_cache"]), x(layer._inputs[3])
    want(value.dim() == 4 and value.dtype == cosine.dtype == sine.dtype, layer, "input and tables are of one type")
    want(places.dtype == torch.int64 and places.dim() == 2, layer, "positions are int64 [batch, sequence]")
    want(not a["interleaved"], layer, "halves, not pairs")
    width = a["rotary_embedding_dim"] or value.shape[-1]
    want(tuple(cosine.shape[1:]) == (width // 2,), layer, f"tables are {width // 2} wide")
    if value.device.type == "meta":
        return value
    c, s = cosine.float()[places][:, None], sine.float()[places][:, None]
    low, high, rest = value.float().split([width // 2, width // 2, value.shape[-1] - width], -1)
    return torch.cat([low * c - high * s, high * c + low * s, rest], -1).to(value.dtype)


def _kv_cache_update(layer: Any, a: Any, x: Any) -> torch.Tensor:
    cache, update, places = x(a["cache"]), x(a["update"]), x(a["write_indices"])
    want(a["cache"]._source is None, layer, "the cache is a network input")
    want(cache.dtype == update.dtype and cache.dtype in FLOATS, layer, f"writes {update.dtype} into {cache.dtype}")
    want(places.dtype in (torch.int32, torch.int64) and places.dim() == 1, layer, "write indices are integers [batch]")
    want(cache.shape[:2] == update.shape[:2] and cache.shape[3] == update.shape[3], layer, "heads and sizes agree")
    if cache.device.type == "meta":
        return cache
    for row, place in enumerate(places.tolist()):
        end = place + update.shape[2]
        want(end <= cache.shape[2], layer, f"writes up to {end} of {cache.shape[2]}")
        cache[row, :, place:end] = update[row]
    return cache


def _attention_v2(layer: Any, a: Any, x: Any) -> torch.Tensor:
    query, key, value = x(a["query"]), x(a["key"]), x(a["value"])
    want(
        query.dtype == key.dtype == value.dtype and query.dtype in FLOATS,
        layer,
        "queries, keys and values are of one type",
    )
    want(query.dim() == key.dim() == 4 and key.shape == value.shape, layer, "inputs are [batch, heads, tokens, size]")
    want(query.shape[1] % key.shape[1] == 0, layer, "query heads divide among the others")
    want(
        a["norm_op"].name == "SOFTMAX" and a["causal_kind"].name == "LOWER_RIGHT" and layer.mask is None,
        layer,
        "is causal",
    )
    if query.device.type == "meta":
        return query
    lengths = x(layer.key_value_lengths)
    want(lengths.dtype == torch.int32 and lengths.dim() == 1, layer, "lengths are int32 [batch]")
    count = query.shape[2]
    j, i = torch.arange(key.shape[2]), torch.arange(count)[:, None]
    allowed = j[None] <= i[None] + (lengths[:, None, None] - count)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.float().repeat_interleave(repeat, 1), value.float().repeat_interleave(repeat, 1)
    scores = (query.float() @ key.transpose(-1, -2)).masked_fill(~allowed[:, None], float("-inf"))
    return (scores.softmax(-1) @ value).to(query.dtype)
