"""Products of outliers, the inputs that are not rounded (LLM.int8), with int8 weights: each row of inputs reads the columns of its own."""

from __future__ import annotations

import ctypes

import torch

from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import threads_for
from runtime.kernels.cpu.library import fields, tensor_of
from runtime.kernels.cpu.panels import PANEL


class Order(ctypes.Structure):
    """`OutlierOrder` of outliers.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weight", "zero", "scale", "column", "first", "place", "value", "y", "memory"),
        *fields(ctypes.c_int64, "rows", "outputs", "columns", "used"),
    )


def add_products(
    y: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> None:
    """`y += (x where mask) W^T`, in float32 sums that for each row are those it has alone.

    Args:
        y: float32 `[n, out]`, contiguous.
        x: `[n, in]` of any float dtype.
        mask: bool `[n, in]`.
        weight: int8 `[out, in]`, contiguous.
        scale, zero: float32 and int8 `[out]`, contiguous; `W = (weight - zero) * scale`.
    """
    native, outputs = library.load(), y.shape[1]
    assert native is not None
    found = mask.nonzero()[:, 1]
    if found.numel() == 0:
        return
    column, place = torch.unique(found, return_inverse=True)
    first = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    value, threads = x[mask].float(), threads_for(found.numel() * outputs)
    memory = tensor_of(threads * column.numel() * PANEL * 4)
    tensors = (weight, zero, scale, column, first, place, value, y, memory)
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    order = Order(*addresses, x.shape[0], outputs, x.shape[1], column.numel())
    native.outliers_add(ctypes.byref(order), threads)
