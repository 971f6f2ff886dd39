"""float8 e4m3 weights on a CPU through this folder's C library: one byte a weight is read."""

from __future__ import annotations

import torch

from runtime.formats.block_float import BlockFloat
from runtime.formats.float8 import FLOAT8
from runtime.formats.float8_block import Float8Block
from runtime.formats.grid import GridScheme
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import CKernel, rounding_of, why_not_rounded

#: Weights stored as blocks with the scale in front: {representation: (C's type, bytes of a scale)}.
_BLOCKS: dict[type, tuple[int, int]] = {BlockFloat: (library.MX8, 1), Float8Block: (library.BLOCK8, 4)}
_WIDE = 128  # columns of a block of BLOCK8


class Float8Cpu(CKernel):
    """`y = s_w (x q_w) + b`, products and sums in float32 in one order: a row does not depend on its neighbours, the threads or the CPU.

    Activations are quantized as the scheme says and dequantized to float32. The weight stays as stored; `row_scale` float32 `[out]`
    is beside it, NaN where a code of the row is. The scale of a block lies in front of its codes: of MXFP8 uint8
    `[out, in / 32, 33]`, of blocks of rows and 128 columns uint8 `[out, in / 128, 132]`, the scale in float32, `weight_scale` as stored.
    """

    name = "float8-c"
    formats = frozenset({"float-quantized", "mxfp8-quantized"})

    def why_not(self, layer: Layer) -> str | None:
        weights = layer.entry.scheme.weights
        if layer.entry.scheme.activations is not None and (reason := why_not_rounded(layer)):
            return reason
        if isinstance(weights, Float8Block) and (weights.width != _WIDE or layer.shape[1] % _WIDE):
            return f"it wants whole blocks of {_WIDE} columns"
        if type(weights) not in _BLOCKS and (not isinstance(weights, GridScheme) or weights.strategy == "group"):
            return "it wants one scale a row, or those of MXFP8 or of blocks"
        if library.load() is None:
            return "it is written in C, and there is no compiler (or COMPRESS_NATIVE=0)"
        return library.why_not_dtype(layer.dtype)

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        codes, scale = tensors["weight"].view(torch.uint8), tensors["weight_scale"]
        weights, kept = layer.entry.scheme.weights, {"weight_scale": scale}
        nan = ((codes & 0x7F) == 0x7F).any(1)
        if isinstance(weights, BlockFloat):
            before, kept = scale.unsqueeze(-1), {}
        elif isinstance(weights, Float8Block):
            rows = scale.float().repeat_interleave(weights.height, 0)[: layer.shape[0]] * library.FLOAT8_UNIT
            before = rows.unsqueeze(-1).view(torch.uint8)
        else:
            row_scale = scale.float().flatten().expand(layer.shape[0]) * library.FLOAT8_UNIT
            return tensors | {"row_scale": row_scale.masked_fill(nan, float("nan"))}
        blocks = codes.unflatten(1, (before.shape[1], -1))
        unit = library.FLOAT8_UNIT if isinstance(weights, BlockFloat) else 1.0
        row_scale = torch.full(nan.shape, unit).masked_fill(nan, float("nan"))
        return kept | {"weight": torch.cat((before, blocks), -1), "row_scale": row_scale}

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        blocks, kind = tensors["weight"], type(layer.entry.scheme.weights)
        if kind is BlockFloat:
            tensors = {"weight_scale": blocks[..., 0].contiguous()}
        if kind in _BLOCKS:
            tensors = tensors | {"weight": blocks[..., _BLOCKS[kind][1] :].flatten(1).view(FLOAT8)}
        return super().restore(tensors, layer)

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        kind, _ = _BLOCKS.get(type(layer.entry.scheme.weights), (library.FLOAT8, 0))
        return library.Linear(
            kind=library.KINDS["dense"],
            weight_type=kind,
            rows=layer.shape[0],
            columns=layer.shape[1],
            weight=tensors["weight"].data_ptr(),
            scale=tensors["row_scale"].data_ptr(),
            rounding=rounding_of(tensors, layer),
            bias=None if bias is None else bias.data_ptr(),
        )

    def path(self, rows: int) -> str:
        return "float32 products of float8 weights, C"
