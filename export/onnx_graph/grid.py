"""Compressed weight as ONNX says it: codes `[K, N]` with a scale for every block of rows, for one column, or for all.

What a dialect cannot say is changed exactly where that is possible (a group of 256 is two of 128 with equal scales; int3 codes are
int4 codes), rounded anew on request, and refused otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from export.source import by_block, in_float32
from runtime.errors import RequestError
from runtime.formats.scheme import CompressedWeight, GridScheme

FLOAT8 = torch.float8_e4m3fn


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


@dataclass(frozen=True)
class Fit:
    """How a dialect says a scheme at some shape, as far as the scheme tells.

    Attributes:
        bits: of a code, 4 or 8.
        block: rows that share a scale; None: one scale a column, or one in all.
        exact: no weight changes; else weights are rounded anew.
        what: what changes about the way it is said, in a clause; None when nothing does.
    """

    bits: int
    block: int | None
    exact: bool = True
    what: str | None = None


def fit(weights: GridScheme, shape: tuple[int, int], rules: Rules, where: str = "a layer") -> Fit:
    """How the scheme at this shape `(out, in)` is said; what cannot be said exactly is rounded anew.

    Args:
        where: the module, for messages.

    Raises:
        RequestError: it cannot be said exactly, and no block fits to round it anew in.
    """
    if weights.type == "float":
        return Fit(8, None)
    bits, columns = 4 if weights.bits <= 4 else 8, shape[1]
    size = weights.group_size if weights.strategy == "group" else None
    reason = why_not(weights, shape, rules)
    if reason is not None:
        block = _block_anew(weights, columns, rules, where)
        width = "one scale a channel" if block is None else f"blocks of {block}"
        return Fit(bits, block, False, f"{reason}: rounded anew to int{bits} codes with {width}")
    parts = [] if weights.bits == bits else [f"int{weights.bits} codes become int{bits} codes"]
    block = _block(size, columns, rules) if bits == 4 or rules.blocked_int8 else None
    if block not in (None, weights.group_size):
        become = f"one scale a {weights.strategy} becomes" if size is None else f"groups of {size} become"
        parts.append(f"{become} blocks of {block} with equal scales")
    return Fit(bits, block, True, ", ".join(parts) or None)


def grid_bytes(weights: GridScheme, shape: tuple[int, int], rules: Rules, scale_bytes: int) -> int:
    """Bytes of a matrix `(out, in)` in the words of `rules`: codes, scales of `scale_bytes` each, zero points."""
    rows, columns = shape
    said = fit(weights, shape, rules)
    count = 1 if said.block is None else -(-columns // said.block)
    codes = rows * (columns if said.block is None else count * said.block) * said.bits // 8
    zeros = 0 if weights.symmetric or not said.exact else rows * -(-count * said.bits // 8)
    return codes + rows * count * scale_bytes + zeros


def _block_anew(weights: GridScheme, columns: int, rules: Rules, where: str) -> int | None:
    """The block that weights are rounded anew in, the nearest to their groups; None: one scale a column.

    Raises:
        RequestError: no block fits.
    """
    if weights.bits > 4 and not rules.blocked_int8:
        return None
    fitting = [b for b in rules.blocks if columns % b == 0 or rules.ragged]
    if not fitting:
        blocks = ", ".join(map(str, rules.blocks))
        raise RequestError(f"{where} has {columns} inputs, which no block of {blocks} divides")
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
    scheme, shape = weight.on_grid[0], weight.shape
    reason = why_not(scheme, shape, rules)
    if reason is None:
        grid = _exact(weight, fit(scheme, shape, rules))
        flipped = grid if rules.negative_scales or scheme.type == "float" else _positive(grid)
        if flipped is not None:
            return flipped
        reason = (
            "negative scales with the code that has no opposite, and scales must be positive (`scales: positive` in a quantize stage "
            "of the recipe makes them so)"
        )
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


def _exact(weight: CompressedWeight, said: Fit) -> Grid:
    scheme, scale = weight.on_grid
    codes = weight.values.t().contiguous()
    block = said.block
    if block is None:
        return Grid(codes, 8, scale.reshape(()) if scheme.strategy == "tensor" else scale.reshape(-1), None, None)
    scales, zero = by_block(scale, scheme, weight.shape, block).t().contiguous(), None
    if weight.zero_point is not None:
        zero = by_block(weight.zero_point, scheme, weight.shape, block).t().contiguous()
    return Grid(codes, said.bits, scales, zero, block)


def _positive(grid: Grid) -> Grid | None:
    """The same weights with positive scales: sign and codes of a block flip together; None where a code has no opposite."""
    spread = grid.scale < 0
    if not bool(spread.any()):
        return grid
    if grid.block is not None:
        spread = spread.repeat_interleave(grid.block, 0)[: grid.codes.shape[0]]
    if bool(((grid.codes == -(1 << (grid.bits - 1))) & spread).any()):
        return None
    codes = torch.where(spread, -grid.codes, grid.codes)
    return Grid(codes, grid.bits, grid.scale.abs(), grid.zero_point, grid.block)


def _round_anew(weight: CompressedWeight, rules: Rules, where: str) -> Grid:
    """Nearest rounding to symmetric blocks (4 bits) or columns (8 bits) with the scale of least squared error among a few."""
    scheme, stored = weight.on_grid
    dense = in_float32(weight)
    rows, columns = dense.shape
    bits = 4 if scheme.bits <= 4 else 8
    high = float(2 ** (bits - 1) - 1)
    block = _block_anew(scheme, columns, rules, where)
    width = block or columns
    padded = torch.nn.functional.pad(dense, (0, -columns % width)).view(rows, -1, width)
    extreme = padded.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    best = torch.full(extreme.shape, float("inf"))
    scale = torch.zeros_like(extreme)
    dtype = stored.dtype
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
