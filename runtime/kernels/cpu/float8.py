"""float8 e4m3 weights on a CPU through this folder's C library: one byte a weight is read."""

from __future__ import annotations

import torch

from runtime.formats.block_float import BlockFloat
from runtime.formats.float8 import FLOAT8
from runtime.formats.grid import GridScheme
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import CKernel, rounding_of, why_not_rounded


class Float8Cpu(CKernel):
    """`y = s_w (x q_w) + b`, products and sums in float32 in one order: a row does not depend on its neighbours, the threads or the CPU.

    Activations are rounded to what the scheme says, and are float32 numbers again. The weight stays as stored; `row_scale` float32 `[out]`
    is beside it, NaN where a code of the row is. MXFP8 has its scales between the codes, so that both are read as they come: uint8
    `[out, in / 32, 33]`, the scale first.
    """

    name = "float8-c"
    formats = frozenset({"float-quantized", "mxfp8-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        weights = layer.entry.scheme.weights
        if layer.entry.scheme.activations is not None and (reason := why_not_rounded(layer)):
            return reason
        if not isinstance(weights, GridScheme) or (weights.strategy == "group" and not _in_blocks(layer)):
            return "it wants one scale a row, or those of MXFP8"
        if library.load() is None:
            return "it is written in C, and there is no compiler (or COMPRESS_NATIVE=0)"
        return library.why_not_dtype(layer.dtype)

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        codes = tensors["weight"].view(torch.uint8)
        nan = ((codes & 0x7F) == 0x7F).any(1)
        if _in_blocks(layer):
            scale = torch.full(nan.shape, library.FLOAT8_UNIT)
            blocks = codes.unflatten(1, (-1, layer.group))
            tensors = {"weight": torch.cat((tensors["weight_scale"].unsqueeze(-1), blocks), -1)}
        else:
            scale = tensors["weight_scale"].float().flatten().expand(layer.shape[0]) * library.FLOAT8_UNIT
        return tensors | {"row_scale": scale.masked_fill(nan, float("nan"))}

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        if _in_blocks(layer):
            blocks = tensors["weight"]
            codes = blocks[..., 1:].flatten(1).view(FLOAT8)
            tensors = {"weight": codes, "weight_scale": blocks[..., 0].contiguous()}
        return super().restore(tensors, layer)

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        return library.Linear(
            kind=library.KINDS["dense"],
            weight_type=library.MX8 if _in_blocks(layer) else library.FLOAT8,
            rows=layer.shape[0],
            columns=layer.shape[1],
            weight=tensors["weight"].data_ptr(),
            scale=tensors["row_scale"].data_ptr(),
            rounding=rounding_of(tensors, layer),
            bias=None if bias is None else bias.data_ptr(),
        )

    def path(self, rows: int) -> str:
        return "float32 products of float8 weights, C"


def _in_blocks(layer: Layer) -> bool:
    return isinstance(layer.entry.scheme.weights, BlockFloat)
