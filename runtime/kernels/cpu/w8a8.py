"""Integer weights and integer activations on a CPU: exact int32 sums, by `torch._int_mm` where the CPU multiplies int8.

Elsewhere `_int_mm` is tens of times slower than a float32 product, which is exact too while the sums stay below 2^24: that many
columns are summed at a time. Outliers, inputs that are not rounded (LLM.int8), are multiplied apart, in C.
"""

from __future__ import annotations

import ctypes

import torch

from runtime.formats.representation import Tensors
from runtime.kernels.activations import outliers, quantize_input
from runtime.kernels.base import Kernel, Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import threads_for
from runtime.kernels.cpu.library import fields, tensor_of
from runtime.kernels.cpu.panels import PANEL
from runtime.system import processes

_FLOAT_EXACT = (1 << 24) >> 14  # columns whose int8 products, at most 2^14 each, add up exactly in float32


class Outliers(ctypes.Structure):
    """`OutlierOrder` of outliers.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weight", "zero", "scale", "column", "first", "place", "value", "y", "memory"),
        *fields(ctypes.c_int64, "rows", "outputs", "columns", "used"),
    )


class W8A8Cpu(Kernel):
    """`y = s_x s_w (sum q_x q_w - z_w sum q_x - z_x sum q_w + in z_x z_w)`, the bracket in exact integers, plus the products of outliers.

    Codes of the activations are the reference's; only the order of the last multiplications differs, which here are in
    float32, as are the products of outliers. The weight stays as stored. Where inputs have a scale a token, a row's result does not
    depend on the other rows.
    """

    name = "w8a8-cpu"
    device = "cpu"
    formats = frozenset({"int-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        reason = layer.why_not_sum_of_codes(outliers=True)
        if reason is None and layer.activations.outliers is not None and library.load() is None:
            return "outliers are multiplied in C, and there is no compiler (or COMPRESS_NATIVE=0)"
        return reason

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        if layer.activations.outliers is None:
            # What the activations' zero point is multiplied with, summed once.
            return tensors | {"row_sum": tensors["weight"].sum(1, dtype=torch.int32)}
        out = tensors | {"row_scale": _by_row(tensors["weight_scale"].float(), layer)}
        if "weight_zero_point" in tensors:
            out["row_zero"] = _by_row(tensors["weight_zero_point"], layer)
        return out

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        rows, columns = layer.shape
        if x.shape[0] == 0:
            return x.new_zeros(0, rows)
        codes, scale, zero = quantize_input(x, layer.activations, tensors)
        codes = codes.to(torch.int8)
        total = integer_product(codes, tensors["weight"])
        weight_zero = tensors.get("weight_zero_point")
        if weight_zero is not None:
            weight_zero = weight_zero.reshape(1, -1).to(torch.int32)
            total -= weight_zero * codes.sum(1, keepdim=True, dtype=torch.int32)
        if zero is not None:
            zero = zero.to(torch.int32).reshape(-1, 1)
            total -= zero * tensors["row_sum"]
            if weight_zero is not None:
                total += columns * zero * weight_zero
        y = total.float() * scale.reshape(-1, 1).float() * tensors["weight_scale"].reshape(1, -1).float()
        if layer.activations.outliers is not None:
            mask = outliers(x, layer.activations)
            add_products(y, x, mask, tensors["weight"], tensors["row_scale"], tensors.get("row_zero"))
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def path(self, rows: int) -> str:
        how = "int8" if processes.multiplies(torch.int8) else "float32, exactly"
        return f"quantize input + torch matmul in {how}"

    def note(self, tensors: Tensors) -> str:
        return ", outliers in float32" if "row_scale" in tensors else ""


def _by_row(parameter: torch.Tensor, layer: Layer) -> torch.Tensor:
    return parameter.flatten().expand(layer.shape[0]).contiguous()


def integer_product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`codes weight^T` in exact integers: int8 `[n, in]` and `[out, in]` to int32 `[n, out]`."""
    if codes.shape[1] == 1:  # torch._int_mm (2.13) leaves all but the first column of such a product unwritten
        return codes.int() * weight.int().t()
    if processes.multiplies(torch.int8):
        return torch._int_mm(codes, weight.t())
    total = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.int32)
    for start in range(0, codes.shape[1], _FLOAT_EXACT):
        part = slice(start, start + _FLOAT_EXACT)
        total += torch.mm(codes[:, part].float(), weight[:, part].float().t()).to(torch.int32)
    return total


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
    order = Outliers(*addresses, x.shape[0], outputs, x.shape[1], column.numel())
    native.outliers_add(ctypes.byref(order), threads)
