"""Many rows on a CPU: tiles of a weight in panels are dequantized on the fly and multiplied by the library's dense product.

Unlike the integer kernels this does not promise that a row's result is independent of the rows beside it: BLAS and oneDNN choose
blocks, and so the order of additions, by the shape of the product.
"""

from __future__ import annotations

import ctypes

import torch

from runtime.formats.representation import Tensors
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import PanelKernel, threads_for
from runtime.kernels.cpu.library import tensor_of
from runtime.kernels.cpu.panels import PANEL, S24, W4, W8
from runtime.system import processes

_TILE = 1 << 18  # weights dequantized at once: a megabyte of float32, which the second cache holds


class DenseTiles(PanelKernel):
    """`x W^T + b` for many rows."""

    name = "dense-tiles"
    classes = frozenset({"prefill"})

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        self.check_input(x, layer)
        native = library.load()
        assert native is not None
        rows, (out, columns) = x.shape[0], layer.shape
        # Without arithmetic of that dtype in float32: the same up to the order of the sums, and several times faster.
        dtype = x.dtype if processes.multiplies(x.dtype) else torch.float32
        wide = x.to(dtype).contiguous()
        y = torch.empty(rows, out, dtype=dtype)
        if rows == 0 or out == 0:
            return y.to(x.dtype)
        panels = -(-out // PANEL)
        step = max(4, _TILE // (PANEL * max(1, columns)))
        linear = ctypes.byref(self.panels.linear(tensors, layer, None))
        scratch = tensor_of(step * PANEL * columns * dtype.itemsize)
        threads = threads_for(step * PANEL * columns)
        for first in range(0, panels, step):
            last = min(panels, first + step)
            part = slice(first * PANEL, min(out, last * PANEL))
            width = part.stop - part.start
            native.linear_dequantize(linear, first, last, scratch.data_ptr(), library.TYPES[dtype], threads)
            tile = scratch[: columns * width * dtype.itemsize].view(dtype).view(columns, width)
            torch.mm(wide, tile, out=y[:, part])
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def path(self, rows: int) -> str:
        return "dequantize tiles in C + dense matmul"


KERNELS = (DenseTiles(S24), DenseTiles(W4), DenseTiles(W8))
