"""float8 e4m3 weights, unquantized activations, on a CPU through this folder's C library: one byte a weight is read."""

from __future__ import annotations

import torch

from runtime.formats.representation import Tensors
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import CKernel


class Float8Cpu(CKernel):
    """`y = s_w (x q_w) + b`, products and sums in float32 in one order: a row does not depend on its neighbours, the threads or the CPU.

    The weight stays as stored; `row_scale` float32 `[out]` is beside it, NaN where a code of the row is.
    """

    name = "float8-c"
    formats = frozenset({"float-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        weights = layer.entry.scheme.grid
        if weights is None or weights.type != "float":
            return "it computes float8 weights"
        if layer.entry.scheme.activations is not None:
            return "it computes with unquantized activations"
        if weights.strategy == "group":
            return "it wants one scale a row"
        if library.load() is None:
            return "it is written in C, and there is no compiler (or COMPRESS_NATIVE=0)"
        return library.why_not_dtype(layer.dtype)

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        scale = tensors["weight_scale"].float().flatten().expand(layer.shape[0]) * library.FLOAT8_UNIT
        nan = ((tensors["weight"].view(torch.uint8) & 0x7F) == 0x7F).any(1)
        return tensors | {"row_scale": scale.masked_fill(nan, float("nan"))}

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        weight = tensors["weight"]
        return library.Linear(
            kind=library.KINDS["dense"],
            weight_type=library.FLOAT8,
            rows=weight.shape[0],
            columns=weight.shape[1],
            weight=weight.data_ptr(),
            scale=tensors["row_scale"].data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
        )

    def path(self, rows: int) -> str:
        return "float32 products of float8 weights, C"
