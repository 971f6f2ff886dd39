"""Number grids of artifacts in GGUF's block types, and the bits of a block.

A block is 32 neighbours of one row with one fp16 scale `d` (`ggml-common.h`):

    Q4_0  d, 16 bytes                    value = d * (u - 8),   u in 0..15       4.5 bits a weight
    Q4_1  d, m, 16 bytes                 value = d * u + m,     u in 0..15       5 bits
    Q5_0  d, 4 bytes of high bits, 16    value = d * (u - 16),  u in 0..31       5.5 bits
    Q8_0  d, 32 bytes                    value = d * q,         q in -128..127   8.5 bits

Byte j of the 16 holds element j in its low half and element j + 16 in its high half. A zero point is folded into the code
(`q - z` is an integer), so an asymmetric grid is exact wherever `q - z` has room. Asymmetric int4 needs 31 values: Q5_0 holds
them exactly; Q4_1 holds them where the smallest value of each group, `-(z + 8) * scale`, is an fp16 number.

Weights of the representation `k_quant` have blocks of these bytes already (`runtime.formats.k_quant`): they are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from export.source import by_block, in_float32
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.scheme import CompressedWeight, GridScheme

BLOCK = 32
BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34}  # of one block
_SIZES = {kind: (BLOCK, size) for kind, size in BYTES.items()}
_SIZES |= {kind: (facts.block, KQuant(kind).block_bytes) for kind, facts in KINDS.items()}
_RANGE = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
_SLICE = 1 << 22  # weights laid out at once


def stored_bytes(count: int, kind: str) -> int:
    """Size of so many weights in blocks of a type, bytes."""
    weights, size = _SIZES[kind]
    return count // weights * size


def aligned(scheme: GridScheme, columns: int) -> bool:
    """Every block of 32 lies inside one group."""
    size = scheme.group_size if scheme.strategy == "group" else None
    return size is None or size % BLOCK == 0 or size >= columns


def block_type(scheme: GridScheme) -> str:
    """The smallest block type that has room for the integers of this grid (int grids only).

    Asymmetric int4 gets "Q5_0", asymmetric int8 "Q8_0" although some of its `q - z` may not fit: `codes_fit` tells.
    """
    low, high = scheme.code_range
    if not scheme.symmetric:
        low, high = low - high, high - low
    return next((name for name, (least, most) in _RANGE.items() if least <= low and high <= most), "Q8_0")


def nominal_type(scheme: GridScheme) -> str:
    """The block type of this many bits, for weights that are rounded anew."""
    if scheme.bits <= 4:
        return "Q4_0" if scheme.symmetric else "Q4_1"
    return "Q5_0" if scheme.bits == 5 else "Q8_0"


def scale_fits(scale: torch.Tensor) -> bool:
    """fp16 holds every scale as it is."""
    return bool((scale.to(torch.float16).float() == scale.float()).all())


def minimum(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Q4_1's m before it becomes fp16, float32: the value of the smallest int4 code."""
    return -(zero.float() + 8) * scale.float()


def slices(weight: CompressedWeight) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows, their codes int16 `[n, columns]` (zero points folded in), scales and zero points float32 `[n, blocks of 32]` (int grids,
    `aligned`), slice by slice."""
    scheme, stored = weight.on_grid
    scale = by_block(stored.float(), scheme, weight.shape, BLOCK)
    zero = torch.zeros_like(scale)
    if weight.zero_point is not None:
        zero = by_block(weight.zero_point.float(), scheme, weight.shape, BLOCK)
    for part in _parts(weight):
        d, z = scale[part], zero[part]
        folded = weight.values[part].to(torch.int16) - z.to(torch.int16).repeat_interleave(BLOCK, 1)
        yield part, folded, d, z


def codes_fit(weight: CompressedWeight, kind: str) -> bool:
    """Every `q - z` has room in the block type."""
    low, high = _RANGE[kind]
    return all(int(codes.min()) >= low and int(codes.max()) <= high for _, codes, _, _ in slices(weight))


def pack(weight: CompressedWeight, kind: str) -> torch.Tensor:
    """uint8 `[rows, columns / 32 * bytes of a block]`: the weight's own codes and scales in blocks; scales (and Q4_1 minima) become fp16.

    Columns are a multiple of 32, groups are `aligned`, codes fit. Scales that fp16 does not hold are rounded: ask before.
    """
    if isinstance(weight.scheme.weights, KQuant):
        return weight.scheme.weights.encode(weight.values, weight.parameters)["weight_blocks"]
    rows, columns = weight.values.shape
    out = torch.empty(rows, columns // BLOCK, BYTES[kind], dtype=torch.uint8)
    for part, integers, scale, zero in slices(weight):
        count, target = integers.shape[0], out[part]
        target[..., :2] = _half(scale)
        if kind == "Q8_0":
            target[..., 2:] = integers.to(torch.int8).view(torch.uint8).view(count, -1, BLOCK)
            continue
        if kind == "Q4_1":
            target[..., 2:4] = _half(minimum(scale, zero))
            offset = zero.to(torch.int16).repeat_interleave(BLOCK, 1) + 8
        else:
            offset = torch.tensor(-_RANGE[kind][0], dtype=torch.int16)
        unsigned = (integers + offset).to(torch.uint8).view(count, -1, 2, BLOCK // 2)
        target[..., -BLOCK // 2 :] = (unsigned[..., 0, :] & 15) | ((unsigned[..., 1, :] & 15) << 4)
        if kind == "Q5_0":
            high = (unsigned >> 4).reshape(count, -1, 4, 8)  # bit i of the 32 belongs to element i
            target[..., 2:6] = (high << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return out.view(rows, -1)


def values(weight: CompressedWeight) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, float32 `[n, columns]`): `(q - z) * scale`, not rounded to the model's dtype. Any grid, k-quants, and float values."""
    grid, kind = weight.scheme.grid, weight.scheme.weights
    shared = grid is None or grid.strategy == "tensor"
    for part in _parts(weight):
        scale, zero = (value if value is None or shared else value[part] for value in (weight.scale, weight.zero_point))
        own = kind.rows(weight.own, part) if isinstance(kind, KQuant) else {}
        some = replace(weight, values=weight.values[part], scale=scale, zero_point=zero, mask=None, own=own)
        yield part, in_float32(some)


def _parts(weight: CompressedWeight) -> Iterator[slice]:
    """Rows that are laid out at once."""
    rows, columns = weight.values.shape
    step = max(1, _SLICE // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _half(value: torch.Tensor) -> torch.Tensor:
    """fp16 as bytes, `[..., 2]`."""
    return value.to(torch.float16).contiguous().view(torch.uint8).view(*value.shape, 2)
