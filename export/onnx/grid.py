"""Compressed weight as ONNX says it: codes `[K, N]` with a scale for every block of rows, for one column, or for all.

What a dialect cannot say is changed exactly where that is possible (a group of 256 is two of 128 with equal scales; int3 codes are
int4 codes), rounded anew on request, and refused otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from runtime.errors import RequestError
from runtime.formats.scheme import CompressedWeight, GridScheme

FLOAT8 = torch.float8_e4m3fn
NEGATIVE = (
    "negative scales with the code that has no opposite, and scales must be positive (`scales: positive` in a quantize stage of the "
    "recipe makes them so)"
)


@dataclass(frozen=True)
class Rules:
    """What a dialect can say of a weight.

    Attributes:
        blocks: block sizes allowed for integer codes, best first; the first one is used where the artifact leaves the choice.
        ragged: the last block of a column may be shorter.
        zero_points: blocks may have a zero point.
        negative_scales: a scale may be negative.
        blocked_int8: 8-bit codes may have blocks; else they need one scale a column, or one in all.
        float8_dequantize: fp8 weights are said with DequantizeLinear; else with Cast and Mul, which every runtime folds at load.
    """

    blocks: tuple[int, ...] = (128, 64, 32, 16, 256)
    ragged: bool = True
    zero_points: bool = True
    negative_scales: bool = True
    blocked_int8: bool = True
    float8_dequantize: bool = False


ONNX = Rules()
TENSORRT = Rules(
    (128, 64), ragged=False, zero_points=False, negative_scales=False, blocked_int8=False, float8_dequantize=True
)


@dataclass(frozen=True)
class Grid:
    """A weight as ONNX stores it.

    Attributes:
        codes: int8 `[K, N]` (4-bit codes one a byte, packed when written) or float8_e4m3fn `[K, N]`.
        bits: 4 or 8.
        scale: `[ceil(K / block), N]`, `[N]` (one a column) or `[]`; the dtype of the artifact's scales.
        zero_point: int8, shape of `scale`; None when symmetric.
        block: rows that share a scale; None where `scale` is `[N]` or `[]`.
        loss: relative error of the weight matrix; 0 where it is exact.
    """

    codes: torch.Tensor
    bits: int
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    block: int | None
    loss: float = 0.0


def why_not(weights: GridScheme, shape: tuple[int, int], rules: Rules) -> str | None:
    """Why the scheme at this shape `(out, in)` cannot be said exactly, as far as the scheme tells; None when it can."""
    if weights.type == "float":
        return None
    if not weights.symmetric and not rules.zero_points:
        return "zero points, and only symmetric grids are possible"
    columns = shape[1]
    if weights.bits > 4 and not rules.blocked_int8:
        return f"{weights.bits}-bit groups of {weights.group_size}" if weights.strategy == "group" else None
    if weights.strategy == "group":
        size = weights.group_size
        assert size is not None
        if _block(size, columns, rules) is None:
            return f"groups of {size}, and blocks are {' or '.join(map(str, sorted(rules.blocks)))}"
        if columns % size and not rules.ragged:
            return f"groups of {size} that do not divide {columns} inputs"
        return None
    if _block(None, columns, rules) is None:
        return f"{columns} inputs, which no block of {' or '.join(map(str, sorted(rules.blocks)))} divides"
    return None


def conversion(weights: GridScheme, shape: tuple[int, int], rules: Rules) -> str | None:
    """What changes about the way the scheme is said, exactly; None when nothing does."""
    if weights.type == "float":
        return None
    parts = []
    if weights.bits not in (4, 8):
        parts.append(f"int{weights.bits} codes become int{4 if weights.bits < 4 else 8} codes")
    if weights.bits <= 4 or rules.blocked_int8:
        block = _block(weights.group_size if weights.strategy == "group" else None, shape[1], rules)
        if block is not None and block != weights.group_size:
            source = (
                f"groups of {weights.group_size}" if weights.strategy == "group" else f"one scale a {weights.strategy}"
            )
            parts.append(
                f"{source} become{'s' if weights.strategy != 'group' else ''} blocks of {block} with equal scales"
            )
    return ", ".join(parts) or None


def grid_bytes(weights: GridScheme, shape: tuple[int, int], rules: Rules, scale_bytes: int) -> int:
    """Bytes of a matrix `(out, in)` in the words of `rules`: codes, scales of `scale_bytes` each, zero points."""
    rows, columns = shape
    changed = why_not(weights, shape, rules) is not None
    bits = 8 if weights.type == "float" or weights.bits > 4 else 4
    block = None
    if changed:
        block = block_anew(weights, columns, rules)
    elif weights.type == "int" and (bits == 4 or rules.blocked_int8):
        block = _block(weights.group_size if weights.strategy == "group" else None, columns, rules)
    count = 1 if block is None else -(-columns // block)
    codes = rows * (columns if block is None else count * block) * bits // 8
    zeros = 0 if weights.symmetric or changed else rows * -(-count * bits // 8)
    return codes + rows * count * scale_bytes + zeros


def rounded_anew(weights: GridScheme, shape: tuple[int, int], rules: Rules) -> str | None:
    """What a weight that cannot be said exactly is rounded to, and why, as far as the scheme tells; None where it can be said.

    Raises:
        RequestError: no block fits.
    """
    reason = why_not(weights, shape, rules)
    if reason is None:
        return None
    block = block_anew(weights, shape[1], rules)
    width = "one scale a channel" if block is None else f"blocks of {block}"
    return f"{reason}: rounded anew to int{4 if weights.bits <= 4 else 8} codes with {width}"


def block_anew(weights: GridScheme, columns: int, rules: Rules) -> int | None:
    """The block that weights are rounded anew in, the nearest to their groups; None: one scale a column.

    Raises:
        RequestError: no block fits.
    """
    if weights.bits > 4 and not rules.blocked_int8:
        return None
    fitting = [b for b in rules.blocks if columns % b == 0 or rules.ragged]
    if not fitting:
        raise RequestError(f"{columns} inputs, which no block of {', '.join(map(str, rules.blocks))} divides")
    wanted = (weights.group_size if weights.strategy == "group" else None) or 128
    return min(fitting, key=lambda b: abs(b - wanted))


def to_grid(weight: CompressedWeight, rules: Rules, requantize: bool, where: str) -> Grid:
    """The weight in the words of `rules`.

    Args:
        weight: codes `[N, K]` of the artifact.
        requantize: round anew what cannot be said exactly.
        where: the module, for messages.

    Raises:
        RequestError: it cannot be said exactly, and `requantize` is off.
    """
    scheme = weight.scheme.grid
    assert scheme is not None
    assert weight.scale is not None
    rows, columns = weight.values.shape
    if scheme.type == "float":
        scale = weight.scale.reshape(()) if scheme.strategy == "tensor" else weight.scale.reshape(rows)
        return Grid(weight.values.t().contiguous(), 8, scale, None, None)
    reason = why_not(scheme, (rows, columns), rules)
    if reason is None:
        grid = _exact(weight, scheme, rules)
        flipped = grid if rules.negative_scales else _positive(grid)
        if flipped is not None:
            return flipped
        reason = NEGATIVE
    if not requantize:
        raise RequestError(f"{where} has {reason}; --requantize rounds it anew and reports the loss")
    return _round_anew(weight, rules, where)


def _block(size: int | None, columns: int, rules: Rules) -> int | None:
    """The block for groups of `size` (None: one scale a row); None where there is none."""
    if size is None or size >= columns:
        return next((b for b in rules.blocks if rules.ragged or columns % b == 0), None)
    if size in rules.blocks:
        return size
    return next((b for b in sorted(rules.blocks, reverse=True) if size % b == 0), None)


def _exact(weight: CompressedWeight, scheme: GridScheme, rules: Rules) -> Grid:
    rows, columns = weight.values.shape
    scale, zero = weight.scale, weight.zero_point
    assert scale is not None
    codes = weight.values.t().contiguous()
    bits = 4 if scheme.bits <= 4 else 8
    if bits == 8 and not rules.blocked_int8:
        return Grid(codes, 8, scale.reshape(()) if scheme.strategy == "tensor" else scale.reshape(rows), None, None)
    size = scheme.group_size if scheme.strategy == "group" else None
    block = _block(size, columns, rules)
    assert block is not None
    count = -(-columns // block)
    # The group that each block lies in: blocks divide groups, or there is one group a row.
    groups = torch.arange(count) * block // size if size is not None else torch.zeros(count, dtype=torch.int64)

    def spread(values: torch.Tensor) -> torch.Tensor:
        values = values.reshape(1, 1).expand(rows, 1) if scheme.strategy == "tensor" else values
        return values[:, groups].t().contiguous()

    return Grid(codes, bits, spread(scale), None if zero is None else spread(zero), block)


def _positive(grid: Grid) -> Grid | None:
    """The same weights with positive scales: sign and codes of a block flip together; None where a code has no opposite."""
    negative = grid.scale < 0
    if not bool(negative.any()):
        return grid
    lowest = -(1 << (grid.bits - 1))
    spread = negative
    if grid.block is not None:
        spread = negative.repeat_interleave(grid.block, 0)[: grid.codes.shape[0]]
    if bool(((grid.codes == lowest) & spread).any()):
        return None
    codes = torch.where(spread, -grid.codes, grid.codes)
    return Grid(codes, grid.bits, grid.scale.abs(), grid.zero_point, grid.block)


def _round_anew(weight: CompressedWeight, rules: Rules, where: str) -> Grid:
    """Nearest rounding to symmetric blocks (4 bits) or columns (8 bits) with the scale of least squared error among a few."""
    scheme = weight.scheme.grid
    assert scheme is not None
    assert weight.scale is not None
    dense = replace(weight, scale=weight.scale.float(), dtype=torch.float32).dequantize()
    rows, columns = dense.shape
    bits = 4 if scheme.bits <= 4 else 8
    high = float(2 ** (bits - 1) - 1)
    try:
        block = block_anew(scheme, columns, rules)
    except RequestError as unfit:
        raise RequestError(f"{where} has {unfit}") from unfit
    padded = dense
    if block is not None:
        padded = torch.nn.functional.pad(dense, (0, -columns % block)).view(rows, -1, block)
    else:
        padded = dense.unsqueeze(1)
    extreme = padded.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    best = torch.full(extreme.shape, float("inf"))
    scale = torch.zeros_like(extreme)
    dtype = weight.scale.dtype
    for shrink in (1.0, 0.96, 0.92, 0.88, 0.84, 0.8):
        tried = (extreme * shrink / high).to(dtype).float().clamp(min=float(torch.finfo(dtype).tiny))
        error = ((padded / tried).round().clamp(-high - 1, high) * tried - padded).square().sum(-1, keepdim=True)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
    codes = (padded / scale).round().clamp(-high - 1, high)
    loss = float((codes * scale - padded).norm() / padded.norm().clamp(min=torch.finfo(torch.float32).tiny))
    codes = codes.reshape(rows, -1)[:, :columns].to(torch.int8).t().contiguous()
    grid = scale.squeeze(-1).to(dtype)
    return Grid(codes, bits, grid.reshape(rows) if block is None else grid.t().contiguous(), None, block, loss)


def turns_positive(weight: CompressedWeight) -> bool:
    """Whether the weight can be said with positive scales, exactly."""
    scheme, scale = weight.scheme.grid, weight.scale
    if scheme is None or scheme.type == "float" or scale is None or weight.zero_point is not None:
        return True
    negative = scale < 0
    if not bool(negative.any()):
        return True
    rows, columns = weight.values.shape
    lowest = weight.values == -(1 << ((4 if scheme.bits <= 4 else 8) - 1))
    size = scheme.group_size if scheme.strategy == "group" else columns
    assert size is not None
    groups = torch.arange(columns) // size
    spread = negative.reshape(1, 1).expand(rows, 1) if scheme.strategy == "tensor" else negative
    return not bool((lowest & spread[:, groups]).any())
