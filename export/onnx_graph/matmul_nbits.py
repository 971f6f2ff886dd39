"""ONNX Runtime's own product of floats and 4- or 8-bit codes, `com.microsoft.MatMulNBits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from export.onnx_graph.builder import Builder
from export.onnx_graph.dialect import Dialect
from export.onnx_graph.grid import Grid
from export.onnx_graph.marks import DOMAIN
from export.onnx_graph.store import nibbles, onnx_type

if TYPE_CHECKING:
    import onnx_ir

MICROSOFT = "com.microsoft"
ACCURACY_LEVEL = 0  # float32 sums; the second graph (`target.write_fast`) has 4, activations rounded to int8
WIDEN = "Widen"


def matmul_nbits(b: Builder, module: str, x: onnx_ir.Value, grid: Grid, dialect: Dialect) -> onnx_ir.Value:
    """`x [..., K]` times the blocked weight. Codes are stored without sign; a missing zero point means 2^(bits - 1)."""
    assert grid.block is not None
    (rows, columns), bits = grid.codes.shape, grid.bits
    scale = grid.scale.t().contiguous()  # [N, blocks]
    exact = torch.equal(scale.to(torch.float16).float(), scale.float())
    stored = b.stored(f"{module}.weight_scale", scale, torch.float16 if exact else dialect.dtype)
    scales = widened(b, stored, dialect.dtype) if exact and dialect.dtype != torch.float16 else stored
    inputs = [x, b.store.add(f"{module}.weight_codes", packed(grid.codes, grid.block, bits)), scales]
    if grid.zero_point is not None:
        inputs.append(b.store.add(f"{module}.weight_zero_point", packed_zero_points(grid.zero_point, bits)))
    return b.op(
        "MatMulNBits", inputs, "MatMulNBits", MICROSOFT, K=rows, N=columns, bits=bits, block_size=grid.block,
        accuracy_level=ACCURACY_LEVEL,
    )  # fmt: skip


def widened(b: Builder, stored: onnx_ir.Value, dtype: torch.dtype, part: str = "scale") -> onnx_ir.Value:
    """A mark for the cast of a constant to `dtype`: what ONNX Runtime's fusions see as a constant they fold or join, and store anew."""
    import onnx_ir as ir

    value: onnx_ir.Value = b.op(WIDEN, [stored], part, DOMAIN, to=int(onnx_type(dtype)))
    value.shape, value.type = stored.shape, ir.TensorType(onnx_type(dtype))
    return value


def unmark(model: onnx_ir.Model) -> None:
    """The marks of `widened` become Casts."""
    for node in model.graph:
        if (node.domain, node.op_type) == (DOMAIN, WIDEN):
            node.domain, node.op_type = "", "Cast"


def packed(codes: torch.Tensor, block: int, bits: int) -> torch.Tensor:
    """Signed codes `[K, N]` as uint8 `[N, blocks, block * bits / 8]`; the earlier of two 4-bit codes in the low half."""
    unsigned = (codes.t().to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    columns, rows = unsigned.shape
    padded = torch.nn.functional.pad(unsigned, (0, -rows % block), value=1 << (bits - 1)).reshape(columns, -1, block)
    return (nibbles(padded) if bits == 4 else padded).contiguous()


def packed_zero_points(zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed zero points `[blocks, N]` as uint8 `[N, ceil(blocks * bits / 8)]`."""
    unsigned = (zero.t().to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    return (nibbles(unsigned) if bits == 4 else unsigned).contiguous()
