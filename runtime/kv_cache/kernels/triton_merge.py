"""Joins the shares of a row that `triton_split.py` computed."""

from __future__ import annotations

from runtime.kernels.triton.jit import entry, tl


@entry
def merge_kernel(
    part, extent, out, lse, M,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One query a program: weighted sums `part` float32 `[rows, SPLITS, M, SIZE]`, and of their weights (scaled by the largest
    score, in powers of 2) largest score and sum, `extent` `[rows, SPLITS, M, 2]`. Where a sum is 0, nothing was written to `part`.
    """
    row, m = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    every = (row * SPLITS + tl.arange(0, SPLITS)) * M + m
    largest = tl.load(extent + 2 * every)
    most = tl.max(largest, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.load(extent + 2 * every + 1) * tl.exp2(largest - base), 0)
    d = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], tl.float32)
    for start in range(0, SPLITS, CHUNK):
        at = (row * SPLITS + start + tl.arange(0, CHUNK)) * M + m
        weight = tl.exp2(tl.load(extent + 2 * at) - base)
        there = tl.load(extent + 2 * at + 1) > 0
        found = tl.load(part + at[:, None] * SIZE + d[None, :], mask=there[:, None] & (d < SIZE)[None, :], other=0.0)
        sums += tl.sum(found * weight[:, None], 0)
    safe = tl.where(total > 0, total, 1.0)
    place = row * tl.num_programs(1) + m
    tl.store(out + place * SIZE + d, sums / safe, mask=d < SIZE)
    tl.store(lse + place, tl.where(total > 0, (most + tl.log2(safe)) * 0.6931471805599453, float("-inf")))
