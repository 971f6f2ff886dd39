"""Quantization of a layer's input at run time, step by step as compressed-tensors does it (same dtype, same
rounding).

One thing differs: a group of subnormal float16 numbers keeps them under a scale that is a power of two, where compressed-tensors has zeros.
Outliers (`ActivationScheme.outliers`) are ours.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from runtime.formats.block_float import round_e2m1_
from runtime.formats.float8 import FLOAT8, FLOAT8_MAXIMUM
from runtime.formats.representation import Tensors
from runtime.formats.scheme import ActivationScheme

_E2M1_MAXIMUM = 6.0
_UP = 1.75 / 2
"""Mantissa (of `frexp`) from which a largest value counts as the next power of two."""


def code_limits(scheme: ActivationScheme) -> tuple[float, float]:
    """Smallest and largest code of the grid."""
    if scheme.type == "float":
        largest = _E2M1_MAXIMUM if scheme.e2m1 else FLOAT8_MAXIMUM
        return -largest, largest
    return -(2.0 ** (scheme.bits - 1)), 2.0 ** (scheme.bits - 1) - 1


def outliers(x: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Bool like `x`: what is not rounded. NaN does not count as an outlier: it makes the whole token NaN, as without outliers."""
    assert scheme.outliers is not None
    return x.abs().float() > scheme.outliers  # not the threshold in the dtype of x


def dynamic_grid(
    x: torch.Tensor, scheme: ActivationScheme, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point (None when symmetric) of `x` `[..., n]`: 0-dimensional for `tensor`, else `[..., 1]`, so that a group must be
    the last dimension.

    Both are in the dtype of `x`, scales beside a `global_scale` in float32. The range always contains zero; a range of zero gets a small
    scale.
    """
    if scheme.strategy == "tensor":
        low, high = torch.aminmax(x)
    else:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    smallest, largest = code_limits(scheme)
    if scheme.symmetric:
        extreme = torch.maximum(-low, high)
        if scheme.scales == "e8m0":
            return _power_of_two(extreme, largest), None
        scale = extreme / ((largest - smallest) / 2)
        if scheme.scales != "e4m3":
            return _positive(scale), None
        assert global_scale is not None
        rounded = (global_scale * scale).clamp_(-FLOAT8_MAXIMUM, FLOAT8_MAXIMUM).to(FLOAT8).float()
        return torch.where(rounded == 0, 0.125, rounded) / global_scale, None
    scale = _positive((high - low) / (largest - smallest))
    zero = (smallest - low / scale).clamp(smallest, largest)
    return scale, zero.round() if scheme.type == "int" else zero.to(FLOAT8).to(x.dtype)


def quantize_input(
    x: torch.Tensor, scheme: ActivationScheme, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes (as numbers in the dtype of `x`, float4 ones in that of the scale; 0 for outliers), scale and zero point.

    Args:
        x: `[..., n]`; of a scheme in groups, `n` is the group.
        tensors: of the layer, with those that calibration has left (`ActivationScheme.tensors`).
    """
    if scheme.dynamic is False:
        scale, zero = tensors["input_scale"], tensors.get("input_zero_point")
        zero = None if zero is None else zero.to(x.dtype)
    else:
        if scheme.outliers is not None:
            x = x.masked_fill(outliers(x, scheme), 0.0)
        scale, zero = dynamic_grid(x, scheme, tensors.get("input_global_scale"))
    codes = x / scale
    if zero is not None:
        codes = codes + zero
    codes = codes.clamp(*code_limits(scheme))
    if scheme.type == "int":
        return codes.round(), scale, zero
    return round_e2m1_(codes * 2) / 2 if scheme.e2m1 else codes.to(FLOAT8).to(x.dtype), scale, zero


def fake_quantize(x: torch.Tensor, scheme: ActivationScheme, tensors: Tensors) -> torch.Tensor:
    """`x` `[..., in]` rounded to the grid and back, in the dtype of the scale (of groups: of `x`); arguments are those of
    `quantize_input`."""
    if x.numel() == 0:
        return x
    if scheme.int8_tail:
        few, tail = x.split([x.shape[-1] - scheme.int8_tail, scheme.int8_tail], -1)
        parts = (few, replace(scheme, int8_tail=0)), (tail, replace(scheme, bits=8, int8_tail=0))
        return torch.cat([fake_quantize(part, own, tensors) for part, own in parts], -1)
    grouped = x if scheme.group_size is None else x.unflatten(-1, (-1, scheme.group_size))
    codes, scale, zero = quantize_input(grouped, scheme, tensors)
    codes = codes.to(scale.dtype)
    values = (codes if zero is None else codes - zero.to(scale.dtype)) * scale
    if scheme.outliers is not None:
        values = torch.where(outliers(x, scheme), x, values)
    return values if scheme.group_size is None else values.flatten(-2).to(x.dtype)


def _power_of_two(extreme: torch.Tensor, largest: float) -> torch.Tensor:
    """Scales for groups of these largest values, in their dtype: the power of two that maps them between 7/8 and 7/4 of that in `largest`,
    the largest code, so that what lies above saturates. NaN where the largest is no number, as for compressed-tensors."""
    mantissa, exponent = torch.frexp(extreme.float())
    exponent = exponent + (mantissa >= _UP) - math.frexp(largest)[1]
    scale = torch.ldexp(torch.ones_like(mantissa), exponent.clamp_(-127, 127)).to(extreme.dtype)
    return torch.where(scale == 0, 1.0, scale).masked_fill(~extreme.isfinite(), torch.nan)


def _positive(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
