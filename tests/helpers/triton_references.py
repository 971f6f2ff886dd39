"""References of the Triton kernels in plain torch, and weights laid out for them from codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from runtime.formats.block_float import HALVES
from runtime.formats.float8 import FLOAT8
from runtime.kernels.triton import layout, sparse24_w4, tuning


@contextmanager
def forced(config: dict[str, Any] | None) -> Iterator[None]:
    """While active, kernels are launched as `config` says, whatever they would choose; None: as they choose."""
    if config is None:
        yield
        return
    with mock.patch.object(tuning, "choose", return_value=config):
        yield


def reorder(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int, field: int
) -> layout.Weight:
    """int8 codes `[N, K]`, scale (and zero point) `[N, groups]` -> `Weight` on the same device."""
    flipped = None if zero is None else zero.t().contiguous()
    return layout.Weight(layout.pack(codes, field), scale.t().contiguous(), flipped, tuple(codes.shape), group, field)


def block_floats(
    fields: torch.Tensor, scale: torch.Tensor, bits: int, global_scale: torch.Tensor | None = None
) -> layout.Weight:
    """Stored e2m1 nibbles or e4m3 bytes uint8 `[N, K]`, scales `[N, groups]` uint8 (e8m0) or float8 -> `Weight`."""
    held = scale.view(torch.int8) if scale.dtype == FLOAT8 else scale
    signed, group = (fields.to(torch.int16) - (1 << bits - 1)).to(torch.int8), fields.shape[1] // scale.shape[1]
    words, shape = layout.pack(signed, bits), tuple(fields.shape)
    return layout.Weight(
        words, held.t().contiguous(), None, shape, group, bits, codes="float", global_scale=global_scale
    )


def sparse(
    codes: torch.Tensor, pairs: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, columns: int, group: int
) -> sparse24_w4.Sparse24Weight:
    """Kept codes int8 `[N, K / 2]`, their columns inside the quad `[N, K / 4, 2]`, scale and zero point `[N, groups]`."""
    words, positions = sparse24_w4.pack(codes, pairs[..., 0], pairs[..., 1], columns)
    flipped, shape = None if zero is None else zero.t().contiguous(), (codes.shape[0], columns)
    return sparse24_w4.Sparse24Weight(words, scale.t().contiguous(), flipped, shape, group, 4, positions=positions)


def dequantize(weight: layout.Weight, dtype: torch.dtype) -> torch.Tensor:
    """`[N, K]` in `dtype`: `(code - zero) * scale`, one rounding."""
    columns = weight.shape[1]
    if weight.codes == "float":
        return _dequantize_floats(weight, dtype)
    if weight.codes != "integer" or weight.scale.dtype == torch.int16:
        return _dequantize_codebook(weight, dtype)
    if isinstance(weight, sparse24_w4.Sparse24Weight):
        codes = codes_and_mask(weight)[0].double()
    else:
        codes = layout.unpack(weight.words, weight.field, columns).double()
    group = torch.arange(columns, device=codes.device) // (weight.group or columns or 1)
    if weight.zero is not None:
        codes -= weight.zero.t()[:, group]
    return (codes * weight.scale.t().double()[:, group]).to(dtype)


def _dequantize_floats(weight: layout.Weight, dtype: torch.dtype) -> torch.Tensor:
    """In float32 as `BlockFloat.dequantize` does it, or in float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    fields = layout.unpack(weight.words, weight.field, weight.shape[1]).int() + (1 << weight.field - 1)
    codes = HALVES[fields].to(wide) / 2 if weight.field == 4 else fields.to(torch.uint8).view(FLOAT8).to(wide)
    scale = weight.scale.t().contiguous()
    if scale.dtype == torch.int8:
        assert weight.global_scale is not None
        steps = scale.view(FLOAT8).to(wide) / weight.global_scale.to(wide)
    else:
        steps = torch.ldexp(torch.ones(scale.shape, dtype=wide), scale.int() - 127)
    return (codes * steps.repeat_interleave(weight.group, 1)).to(dtype)


def _dequantize_codebook(weight: layout.Weight, dtype: torch.dtype) -> torch.Tensor:
    """Entries of tables, unsigned integers under a minimum, and scales that are products."""
    columns = weight.shape[1]
    codes = layout.unpack(weight.words, weight.field, columns)
    if weight.table is not None:
        codes = layout.table_entries(weight.table).gather(1, codes.long() + 8)
    elif weight.codes == "minimum":
        codes = codes.short() + (1 << weight.field - 1)
    group = torch.arange(columns, device=codes.device) // (weight.group or columns or 1)

    scale, minima = weight.scale, None
    if scale.dtype == torch.int16:
        found = layout.unpack_products(scale, weight.groups, weight.codes == "minimum")
        per = layout.BLOCK // weight.group
        scale = (found["d"].double().repeat_interleave(per, 1) * found["scale"]).t()
        if weight.codes == "minimum":
            minima = found["dmin"].double().repeat_interleave(per, 1) * found["minimum"]
    values = codes * scale.t().double()[:, group]
    return (values if minima is None else values - minima[:, group]).to(dtype)


def codes_and_mask(weight: sparse24_w4.Sparse24Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 `[N, K]` (the zero point, or 0, where pruned) and the mask of kept positions bool `[N, K]`."""
    kept, first, second = sparse24_w4.unpack(weight)
    rows, columns = weight.shape
    quad = torch.arange(columns // 4, device=kept.device) * 4
    at = torch.stack([first + quad, second + quad], dim=-1).flatten(1)
    codes = torch.zeros(rows, columns, dtype=torch.int8, device=kept.device)
    if weight.zero is not None:
        group = torch.arange(columns, device=kept.device) // (weight.group or columns)
        codes.copy_(weight.zero.t()[:, group])
    return codes.scatter_(1, at, kept), torch.zeros_like(codes, dtype=torch.bool).scatter_(1, at, True)


def linear(x: torch.Tensor, weight: layout.Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias` in float64: `[M, K]` -> `[M, N]`."""
    y = x.double() @ dequantize(weight, torch.float64).t()
    return y if bias is None else y + bias.double()


def w8a8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    weight_zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """`w8a8.product` in float64."""
    left, right = codes.double(), weight.double()
    if zero is not None:
        left = left - zero.double()[:, None]
    if weight_zero is not None:
        right = right - weight_zero.double()[:, None]
    y = left @ right.t() * scale.double()[:, None] * weight_scale.double()[None, :]
    return y if bias is None else y + bias.double()
