"""Quantization of a layer's input at run time, step by step as compressed-tensors does it (same dtype, same
rounding).
"""

from __future__ import annotations

import torch

from runtime.formats.float8 import FLOAT8, FLOAT8_MAXIMUM
from runtime.formats.representation import Tensors
from runtime.formats.scheme import ActivationScheme


def code_limits(scheme: ActivationScheme) -> tuple[float, float]:
    """Smallest and largest code of the grid."""
    if scheme.type == "float":
        return -FLOAT8_MAXIMUM, FLOAT8_MAXIMUM
    return -(2.0 ** (scheme.bits - 1)), 2.0 ** (scheme.bits - 1) - 1


def dynamic_grid(x: torch.Tensor, scheme: ActivationScheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point (None when symmetric) of `x` `[..., in]`: `[..., 1]` for `token`, 0-dimensional for
    `tensor`.

    Both are in the dtype of `x`. The range always contains zero; a range of zero gets the scale `eps`.
    """
    if scheme.strategy == "token":
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    else:
        low, high = torch.aminmax(x)
    low, high = low.clamp(max=0), high.clamp(min=0)
    smallest, largest = code_limits(scheme)
    if scheme.symmetric:
        return _positive(torch.maximum(-low, high) / ((largest - smallest) / 2)), None
    scale = _positive((high - low) / (largest - smallest))
    zero = (smallest - low / scale).clamp(smallest, largest)
    return scale, zero.round() if scheme.type == "int" else zero.to(FLOAT8).to(x.dtype)


def quantize_input(
    x: torch.Tensor, scheme: ActivationScheme, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes (as numbers in the dtype of `x`), scale and zero point.

    Args:
        tensors: of the layer, with `input_scale` and `input_zero_point` where the scheme is static.
    """
    if scheme.dynamic:
        scale, zero = dynamic_grid(x, scheme)
    else:
        scale, zero = tensors["input_scale"], tensors.get("input_zero_point")
        zero = None if zero is None else zero.to(x.dtype)
    codes = x / scale
    if zero is not None:
        codes = codes + zero
    codes = codes.clamp(*code_limits(scheme))
    codes = codes.round() if scheme.type == "int" else codes.to(FLOAT8).to(x.dtype)
    return codes, scale, zero


def fake_quantize(x: torch.Tensor, scheme: ActivationScheme, tensors: Tensors) -> torch.Tensor:
    """`x` rounded to the grid and back, in the dtype of the scale; arguments are those of `quantize_input`."""
    if x.numel() == 0:
        return x
    codes, scale, zero = quantize_input(x, scheme, tensors)
    codes = codes.to(scale.dtype)
    return (codes if zero is None else codes - zero.to(scale.dtype)) * scale


def _positive(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
