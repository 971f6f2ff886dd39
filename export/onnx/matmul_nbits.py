"""ONNX Runtime's own product of floats and 4- or 8-bit codes, `com.microsoft.MatMulNBits`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from export.onnx.builder import Builder
from export.onnx.dialect import Dialect
from export.onnx.grid import Grid

if TYPE_CHECKING:
    import onnx_ir

MICROSOFT = "com.microsoft"


def matmul_nbits(b: Builder, module: str, x: onnx_ir.Value, grid: Grid, dialect: Dialect) -> onnx_ir.Value:
    """`x [..., K]` times the blocked weight. Codes are stored without sign; a missing zero point means 2^(bits - 1)."""
    assert grid.block is not None
    (rows, columns), bits = grid.codes.shape, grid.bits
    scale = grid.scale.t().contiguous()  # [N, blocks]
    exact = torch.equal(scale.to(torch.float16).float(), scale.float())
    stored = b.store.add(f"{module}.weight_scale", scale.to(torch.float16) if exact else scale.to(dialect.dtype))
    scales = b.cast(stored, dialect.dtype, "scale") if exact and dialect.dtype != torch.float16 else stored
    inputs = [x, b.store.add(f"{module}.weight_codes", packed(grid.codes, grid.block, bits)), scales]
    if grid.zero_point is not None:
        inputs.append(b.store.add(f"{module}.weight_zero_point", packed_zero_points(grid.zero_point, bits)))
    product: onnx_ir.Value = b.op(
        "MatMulNBits", inputs, "MatMulNBits", MICROSOFT, K=rows, N=columns, bits=bits, block_size=grid.block,
        accuracy_level=dialect.accuracy_level,
    )  # fmt: skip
    return product


def packed(codes: torch.Tensor, block: int, bits: int) -> torch.Tensor:
    """Signed codes `[K, N]` as uint8 `[N, blocks, block * bits / 8]`; the earlier of two 4-bit codes in the low half."""
    unsigned = (codes.t().to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    columns, rows = unsigned.shape
    padded = torch.nn.functional.pad(unsigned, (0, -rows % block), value=1 << (bits - 1)).reshape(columns, -1, block)
    if bits == 4:
        padded = padded[..., ::2] | (padded[..., 1::2] << 4)
    return padded.contiguous()


def packed_zero_points(zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed zero points `[blocks, N]` as uint8 `[N, ceil(blocks * bits / 8)]`."""
    unsigned = (zero.t().to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if bits == 4:
        if unsigned.shape[1] % 2:
            unsigned = torch.nn.functional.pad(unsigned, (0, 1))
        unsigned = unsigned[:, ::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous()
