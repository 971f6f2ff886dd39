"""Grid of a layer's inputs that calibration leaves: scales of the range that was seen."""

from __future__ import annotations

import torch

from runtime.formats.activation_scheme import ActivationScheme
from runtime.formats.float8 import FLOAT8_MAXIMUM
from runtime.formats.representation import Tensors


def calibrated_tensors(
    activations: ActivationScheme | None, low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype
) -> Tensors:
    """What the range [low, high] of the inputs (0-dimensional) says of a static grid: `input_scale` `[1]` in `dtype` (and
    `input_zero_point`), or `input_global_scale`, with which the largest value becomes 6 at the largest scale. Nothing for other grids."""
    if activations is None or not activations.calibrated:
        return {}
    low, high = torch.clamp(low, max=0.0), torch.clamp(high, min=0.0)
    largest = torch.maximum(-low, high)
    if activations.dynamic == "local":
        found = FLOAT8_MAXIMUM * 6 / torch.where(largest > 0, largest, FLOAT8_MAXIMUM * 6).float()
        return {"input_global_scale": found.clamp(max=torch.finfo(torch.float32).max).reshape(1).cpu()}
    if activations.type == "float":
        return {"input_scale": _positive(largest / FLOAT8_MAXIMUM, dtype)}
    levels = 2**activations.bits
    if activations.symmetric:
        return {"input_scale": _positive(largest / (levels / 2 - 1), dtype)}
    scale = _positive((high - low) / (levels - 1), dtype)
    zero = torch.round(-(levels // 2) - low / scale.float().to(low.device)).clamp(-(levels // 2), levels // 2 - 1)
    return {"input_scale": scale, "input_zero_point": zero.reshape(1).to(torch.int8)}


def _positive(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return scale.float().clamp_min(torch.finfo(dtype).tiny * 16).reshape(1).to(dtype).cpu()
