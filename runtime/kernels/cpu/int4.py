"""4-bit weights on a CPU through torch's own int4 kernel (`_weight_int4pack_mm_for_cpu`), bfloat16 activations.

The kernel wins while the weight's bytes are what takes time; above `FEW_ROWS` rows the weight is dequantized for the
dense product. Torch's layout stores blocks of 16, 32 or 64 rows (it depends on the vector unit), column by column, two
codes a byte. Packing numbered matrices tells which row each nibble holds, so nothing here assumes an instruction set.
"""

from __future__ import annotations

from functools import cache

import torch

from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.base import Kernel, Layer

# Measured on x86 with AVX-512 (one thread, 2048 x 2048, group 128): torch's kernel takes 0.2 ms at 1 row and 0.1 more a
# row, dequantizing and multiplying 4 ms.
FEW_ROWS = 32
GROUPS = (256, 128, 64, 32)  # what torch's kernel takes
_BLOCK = 64  # rows are padded to this, a multiple of every block size


class Int4Cpu(Kernel):
    """`y = x W^T` with codes of 2-4 bits, laid out as 4 bits: 4.25 bits a weight at group 128, 4.5 at group 64.

    Value of a code: `(q - 8) * scale + zero` with `zero = -zero_point * scale` rounded to bfloat16, as torch's kernel
    wants it. Rows are padded to 64 and columns to the group. `bitmap` and `sparse24` weights
    keep their positions too (one more bit), because the stored tensors must come back exactly.
    """

    name = "int4-cpu"
    device = "cpu"
    formats = frozenset({"pack-quantized", "packed", "sparse24", "bitmap"})

    def why_not(self, layer: Layer) -> str | None:
        reason = layer.why_not_weight_only(2, 4, multiple=32)
        if reason is None and layer.dtype != torch.bfloat16:
            reason = "torch's int4 kernel is fast with bfloat16 activations only"
        if reason is None and _row_order() is None:
            reason = "torch's int4 layout on this CPU is not one that can be read back"
        return reason

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        (rows, columns), weight = layer.shape, layer.unpack(tensors)
        assert weight.scale is not None
        group = _group(layer)
        wide, high = -(-columns // group) * group, -(-rows // _BLOCK) * _BLOCK
        codes = torch.zeros(high, wide, dtype=torch.int32)
        codes[:rows, :columns] = weight.values
        codes += 8
        out = {"weight": torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)}
        del codes
        scale = torch.zeros(high, wide // group, dtype=torch.float32)
        scale[:rows] = _per_group(weight.scale, layer, group).float()
        zero = torch.zeros_like(scale)
        if weight.zero_point is not None:
            zero[:rows] = -_per_group(weight.zero_point, layer, group).float()
            zero *= scale
            out["zero_point"] = weight.zero_point
        out["scales_and_zeros"] = torch.stack([scale.t(), zero.t()], dim=-1).to(torch.bfloat16).contiguous()
        if not layer.group or weight.scale.dtype != torch.bfloat16:
            out["scale"] = weight.scale
        if layer.storage.positions is not None:
            out[layer.storage.positions] = tensors[layer.storage.positions]
        return out

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        (rows, columns), order = layer.shape, _row_order()
        assert order is not None
        packed, block = tensors["weight"], order.numel()
        wide = packed.shape[1] * 2
        nibbles = packed.view(-1, wide, block // 2).transpose(1, 2).contiguous()
        codes = torch.empty(nibbles.shape[0], block, wide, dtype=torch.uint8)
        codes[:, order[0::2]] = nibbles & 15
        codes[:, order[1::2]] = nibbles >> 4
        values = codes.view(-1, wide)[:rows, :columns].view(torch.int8) - 8
        scale = tensors.get("scale")
        if scale is None:
            step = layer.group // _group(layer)
            scale = tensors["scales_and_zeros"][::step, :rows, 0].t().contiguous()
        zero, mask = tensors.get("zero_point"), layer.storage.mask(tensors, columns)
        return CompressedWeight(values.contiguous(), scale, zero, mask, layer.entry.scheme, layer.dtype)

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > FEW_ROWS:
            return self.multiply_dense(x, tensors, layer, bias)
        packed = tensors["weight"]
        x = torch.nn.functional.pad(x, (0, packed.shape[1] * 2 - x.shape[1])).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, _group(layer), tensors["scales_and_zeros"])
        y = y[:, : layer.shape[0]]
        return y.contiguous() if bias is None else y + bias

    def path(self, rows: int) -> str:
        return "torch int4 matmul" if rows <= FEW_ROWS else "dequantize + dense matmul"


def _group(layer: Layer) -> int:
    """Group size torch's kernel is called with: it divides ours, and pads the row least."""
    fitting = [g for g in GROUPS if layer.group % g == 0]
    return min(fitting, key=lambda g: (-(-layer.shape[1] // g) * g, -g))


def _per_group(grid: torch.Tensor, layer: Layer, group: int) -> torch.Tensor:
    """Scales or zero points as `[out, groups of the kernel]`."""
    count = -(-layer.shape[1] // group)
    if not layer.group:
        return grid.reshape(-1, 1).expand(layer.shape[0], count)
    return grid.repeat_interleave(layer.group // group, dim=1)[:, :count]


@cache
def _row_order() -> torch.Tensor | None:
    """Row within its block of each nibble, in storage order; None when the layout is not blocks of rows, column by
    column.
    """
    columns = 4
    place = torch.arange(_BLOCK * columns).view(_BLOCK, columns)
    found = torch.zeros(_BLOCK * columns, dtype=torch.int64)
    for shift in (0, 4):  # the place of a code is written in two 4-bit digits, one matrix each
        digits = (place >> shift & 15).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(digits, 1).view(-1)
        found |= torch.stack([packed & 15, packed >> 4], dim=-1).view(-1).to(torch.int64) << shift
    for block in (64, 32, 16):
        order = found[:block] // columns
        rows = torch.arange(0, _BLOCK, block).view(-1, 1, 1) + order  # [blocks, 1, block]
        expected = rows * columns + torch.arange(columns).view(1, -1, 1)
        if torch.equal(found, expected.flatten()) and torch.equal(order.sort()[0], torch.arange(block)):
            return order
    return None
