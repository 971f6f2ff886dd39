"""W8A16: 8-bit weights (5 to 8 bits held as 8), float16 or bfloat16 activations, any number of rows; see `w4a16.py`."""

from __future__ import annotations

import torch

from runtime.kernels.triton import layout
from runtime.kernels.triton.w4a16 import linear, path

__all__ = ["FIELD", "linear", "path", "prepare"]

FIELD = 8


def prepare(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int) -> layout.Weight:
    """int8 codes `[N, K]`, scale and zero point `[N, groups]` -> the weight as the kernels read it; `group` as in
    `w4a16.prepare`.
    """
    return layout.reorder(codes, scale, zero, group, FIELD)
