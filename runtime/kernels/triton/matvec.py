"""Products without tensor cores: with packed weights for 1 or 2 rows, which only memory bandwidth should bound, and with outliers.

No tensor cores: at these row counts they would idle, and feeding them costs registers. A program owns two blocks of rows of
the weight and walks along K, `TILES` tiles at a time; every word is read once, 16 bytes a thread, marked evict-first so that the
activations stay in the cache. A weight costs one AND, a float two shifts more, and one FMA a row of x: codes are used as subnormal
floats (`codes.code_tiny`), the activations, which all rows share, carry the factor. Scales and zero points are applied to each
thread's partial sums, once a group. After ideas of gemlite and of split-K fused dequantization (arXiv 2402.00025). `SPLIT_K > 1` writes
float32 partial sums that a second kernel adds in order, so results repeat bit for bit.

Codes that select an entry of a table (row codebooks, IQ4) are looked up first, four at a time (`tables.look_up`). Outliers of row
codebooks, as many in each row, are added to a product in which a level near zero stood in their places.

The factor limits the activations: a product is right for 2^-53 < |x| < 2^52, smaller ones lose digits, larger ones overflow.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import layout
from runtime.kernels.triton.codes import (
    code_tiny,
    load_grids,
    load_scale,
    over_global_scale,
    row_major,
    scale_for_tiny,
    tile_words,
)
from runtime.kernels.triton.jit import cdiv, entry, jit, tl
from runtime.kernels.triton.split_k import product, vector_configurations, widest_split
from runtime.kernels.triton.tables import load_table, look_up
from runtime.kernels.triton.tuning import Config

MAXIMUM_ROWS = 2


@jit
def _activations(x, k, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x + k).to(tl.float32)
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)


@jit
def _scaled(
    part, total, scale, zero, group, owned, N, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, ASYMMETRIC: tl.constexpr,
):  # fmt: skip
    """`s * sum x (u - 2^(F-1) - z)`, of floats `s * sum x u`, under minima `s * sum x u - m * sum x`, out of `part = sum x u 2^-73` and
    `total = sum x`."""
    s, z = load_grids(scale, zero, group, owned[:, None], N, groups, GROUP, ASYMMETRIC)
    s, z = s[:, :, None], z[:, :, None]
    if CODES == "float":
        return part * 9444732965739290427392.0 * s  # 2^73
    if CODES == "minimum":
        return part * 9444732965739290427392.0 * s - total[None, :, :] * z
    z += 128 if CODES == "table" else 1 << (FIELD - 1)
    return (part * 9444732965739290427392.0 - total[None, :, :] * z) * s


@jit
def _codes(words, table, j: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr):
    """Field `j` as `code_tiny` gives it, or the entry that it selects from the tables."""
    if CODES == "table":
        return code_tiny(look_up(words, table, j), j % 4, 8, "integer")
    else:
        return code_tiny(words, j, FIELD, CODES)


@jit
def _finish(sums, scale, zero, out, bias, n, N, HAS_BIAS: tl.constexpr):
    y = over_global_scale(tl.sum(tl.sum(sums, 2), 1), scale, zero)
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@jit
def vector_product(
    x, words, scale, zero, bias, out,
    stride, M, N, K, tiles, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """What one program of a grid `(blocks of the weight's rows, SPLIT_K)` computes."""
    FIELDS: tl.constexpr = 32 // FIELD
    n = tl.program_id(0) * (2 * BLOCK_N) + tl.arange(0, BLOCK_N)
    # Rows past the end repeat the last one and are not stored: no mask in the loop.
    owned_a, owned_b = tl.minimum(n, N - 1), tl.minimum(n + BLOCK_N, N - 1)
    table_a = load_table(zero, owned_a[:, None, None], N, CODES)
    table_b = load_table(zero, owned_b[:, None, None], N, CODES)
    tile, word = tl.arange(0, TILES), tl.arange(0, 16)
    second = x + tl.cast(stride, tl.int64)
    sum_a0 = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
    sum_b0 = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
    sum_a1 = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
    sum_b1 = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
    steps = tl.cdiv(tiles, TILES)
    share = tl.cdiv(steps, SPLIT_K)
    first = tl.program_id(1) * share
    for step in range(first, tl.minimum(first + share, steps)):
        at = step * TILES + tile
        if not EVEN_K:
            at = tl.minimum(at, tiles - 1)  # tiles past the end: their activations are masked
        base = words + tl.cast(step, tl.int64) * TILES * N * 16
        last = tiles - 1 - step * TILES
        w_a = tile_words(base, last, N, owned_a, BLOCK_N, TILES)
        w_b = tile_words(base, last, N, owned_b, BLOCK_N, TILES)
        for run in tl.static_range(FIELDS // RUN):
            part_a0 = tl.zeros([BLOCK_N, TILES, 16], tl.float32)
            all0 = tl.zeros([TILES, 16], tl.float32)
            part_b0, part_a1, part_b1, all1 = part_a0, part_a0, part_a0, all0
            for i in tl.static_range(RUN):
                k = (step * TILES + tile)[:, None] * (FIELDS * 16) + (run * RUN + i) * 16 + word[None, :]
                a = _codes(w_a, table_a, run * RUN + i, FIELD, CODES)
                b = _codes(w_b, table_b, run * RUN + i, FIELD, CODES)
                x0 = _activations(x, k, K, EVEN_K)
                all0 += x0
                x0 = scale_for_tiny(x0, run * RUN + i, FIELD, CODES)
                part_a0 += a * x0[None, :, :]
                part_b0 += b * x0[None, :, :]
                if ROWS > 1:
                    x1 = _activations(second, k, K, EVEN_K)
                    all1 += x1
                    x1 = scale_for_tiny(x1, run * RUN + i, FIELD, CODES)
                    part_a1 += a * x1[None, :, :]
                    part_b1 += b * x1[None, :, :]
            if GROUP == 0:
                group = tile[None, :] * 0
            else:
                group = tl.minimum((at * (FIELDS * 16) + run * RUN * 16) // GROUP, groups - 1)[None, :]
            sum_a0 += _scaled(part_a0, all0, scale, zero, group, owned_a, N, groups, GROUP, FIELD, CODES, ASYMMETRIC)
            sum_b0 += _scaled(part_b0, all0, scale, zero, group, owned_b, N, groups, GROUP, FIELD, CODES, ASYMMETRIC)
            if ROWS > 1:
                sum_a1 += _scaled(
                    part_a1, all1, scale, zero, group, owned_a, N, groups, GROUP, FIELD, CODES, ASYMMETRIC
                )
                sum_b1 += _scaled(
                    part_b1, all1, scale, zero, group, owned_b, N, groups, GROUP, FIELD, CODES, ASYMMETRIC
                )
    out += tl.cast(tl.program_id(1), tl.int64) * M * N
    _finish(sum_a0, scale, zero, out, bias, n, N, HAS_BIAS)
    _finish(sum_b0, scale, zero, out, bias, n + BLOCK_N, N, HAS_BIAS)
    if ROWS > 1:
        _finish(sum_a1, scale, zero, out + N, bias, n, N, HAS_BIAS)
        _finish(sum_b1, scale, zero, out + N, bias, n + BLOCK_N, N, HAS_BIAS)


@entry
def matvec_kernel(
    x, words, scale, zero, bias, out,
    stride, M, N, K, tiles, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    vector_product(
        x, words, scale, zero, bias, out, stride, M, N, K, tiles, groups,
        GROUP, FIELD, CODES, RUN, ASYMMETRIC, HAS_BIAS, EVEN_K, ROWS, BLOCK_N, TILES, SPLIT_K,
    )  # fmt: skip


def configurations(rows: int, weight: layout.Weight) -> list[Config]:
    """Launches worth trying, the default first: some hundred programs fill a GPU, so a narrow weight is split along K."""
    tiles = weight.words.shape[0]
    split = widest_split(weight.shape[0] // 32, 512, tiles // 8)
    chosen = [(16, 4, split, 4), (16, 4, 2 * split, 4), (8, 4, split, 4), (8, 4, split, 2), (16, 8, split, 8), (8, 8, split, 4),
              (8, 8, max(1, split // 2), 8), (32, 4, 2 * split, 8)]  # fmt: skip
    return vector_configurations(chosen, tiles)


def matvec(x: torch.Tensor, weight: layout.Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias` for `x` `[1 or 2, K]` float16 or bfloat16 -> `[M, N]` in the dtype of `x`; sums in float32."""
    rows = x.shape[0]
    assert rows <= MAXIMUM_ROWS

    def grid(config: Config) -> tuple[int, ...]:
        return cdiv(weight.shape[0], 2 * config["BLOCK_N"]), config["SPLIT_K"]

    return product(matvec_kernel, x, weight, bias, configurations(rows, weight), grid, key=rows, ROWS=rows)


@entry
def outliers_kernel(
    y, x, columns, values, scale, held, out,
    stride, M, N, count,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    owned, row = tl.minimum(n, N - 1), tl.minimum(m, M - 1).to(tl.int64)
    level = tl.load(held + owned).to(tl.float32)[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_C], tl.float32)
    for first in range(0, count, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        at, inside = owned.to(tl.int64)[:, None] * count + c[None, :], (c < count)[None, :]
        column = tl.load(columns + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
        group = owned[:, None] + column * 0
        if GROUP != 0:
            group += (column // GROUP) * N
        more = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) - level * load_scale(scale + group)
        more = tl.where(inside, more, 0.0)
        sums += tl.load(x + row[:, None, None] * stride + column[None, :, :]).to(tl.float32) * more[None, :, :]
    at, inside = m.to(tl.int64)[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) + tl.sum(sums, 2)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add_outliers(
    y: torch.Tensor, x: torch.Tensor, weight: layout.Weight, held: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """The product of `x` `[M, K]` with a weight of tables and its outliers -> `[M, N]` in the dtype of `y`.

    Args:
        y: the product without them.
        held: int8 `[N]`, the entry of a row's table that stands in the places of its outliers in `weight`.
        columns: int16 `[N, count]`, unsigned, in ascending order.
        values: `[N, count]`, what these columns hold.
    """
    x = row_major(x)
    (rows, _), (n, _), count = x.shape, weight.shape, columns.shape[1]
    if not y.numel() or not count:
        return y
    out, block = torch.empty_like(y), 1 if rows == 1 else 8
    outliers_kernel[(cdiv(n, 16), cdiv(rows, block))](
        y, x, columns, values, weight.scale, held, out, x.stride(0), rows, n, count,
        GROUP=weight.group, BLOCK_M=block, BLOCK_N=16, BLOCK_C=16, num_warps=4,
    )  # fmt: skip
    return out
