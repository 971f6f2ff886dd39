"""Attention of one query a sequence over pages (flash-decoding): grouped queries, ragged lengths, sliding windows.

A program owns one key/value head of one sequence and a share of its positions; the query heads that read this head are the rows
of one small tensor core product, so every key and value is loaded once. A second kernel joins the shares by their log-sum-exp.

How a sequence is cut depends on its own length and on nothing else in the step: its numbers are the same in any batch. Programs
without a share end at once, so that the grid, which a CUDA graph freezes, can be that of the longest sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.engines.cuda.cache import CacheLayer
from runtime.kernels.triton.jit import entry, jit, next_power_of_2, tl

LEAST_SHARE = 2  # blocks of a share: with fewer, partial results would be a large part of the traffic
MOST_SPLITS = 32
PROGRAMS = 256  # wanted for a single sequence: some two a multiprocessor


@jit
def _shares(position, window, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr):
    """First visible position, first block, number of blocks, blocks a share."""
    start = 0
    if WINDOWED:
        start = tl.maximum(position + 1 - window, 0)
    first = start // BLOCK
    blocks = position // BLOCK + 1 - first
    return start, first, blocks, tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)


@entry
def split_kernel(
    q, keys, values, tables, positions, out, part, extent,
    q_stride, page_stride, token_stride, table_stride, scale, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    start, first, blocks, share = _shares(position, window, BLOCK, SPLITS, LEAST, WINDOWED)
    begin = split * share
    if begin >= blocks:
        return
    end = first + tl.minimum(begin + share, blocks)
    m, d, n = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    own = (m < GROUP)[:, None] & (d < SIZE)[None, :]
    at = (head * GROUP + m)[:, None] * SIZE + d[None, :]
    query = tl.load(q + row * q_stride + at, mask=own, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for block in tl.range(first + begin, end, num_stages=STAGES):
        page = tl.load(tables + row * table_stride + block * BLOCK // PAGE).to(tl.int64)
        base = page * page_stride + (block * BLOCK % PAGE + n) * token_stride + head * SIZE
        seen = (block * BLOCK + n <= position) & (block * BLOCK + n >= start)
        k = tl.load(keys + base[None, :] + d[:, None], mask=(d < SIZE)[:, None] & seen[None, :], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale  # the scale brings log2(e) along
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))  # finite: every block of the range has a visible position
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(most - higher)
        v = tl.load(values + base[:, None] + d[None, :], mask=seen[:, None] & (d < SIZE)[None, :], other=0.0)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
        most = higher
    sums = sums / total[:, None]
    if SPLITS == 1:
        tl.store(out + row * tl.num_programs(1) * GROUP * SIZE + at, sums.to(out.dtype.element_ty), mask=own)
    else:
        place = (row * SPLITS + split) * tl.num_programs(1) * GROUP
        tl.store(part + place * SIZE + at, sums, mask=own)
        tl.store(extent + place + head * GROUP + m, most + tl.log2(total), mask=m < GROUP)


@entry
def join_kernel(
    part, extent, positions, out, window,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    row, head, heads = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1), tl.num_programs(1)
    _, _, blocks, share = _shares(tl.load(positions + row), window, BLOCK, SPLITS, LEAST, WINDOWED)
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    used = s * share < blocks
    place = (row * SPLITS + s) * heads + head
    size = tl.load(extent + place, mask=used, other=float("-inf"))
    weights = tl.exp2(size - tl.max(size, 0))
    parts = tl.load(part + place[:, None] * SIZE + d[None, :], mask=used[:, None] & (d < SIZE)[None, :], other=0.0)
    y = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (row * heads + head) * SIZE + d, y.to(out.dtype.element_ty), mask=d < SIZE)


def splits(kv_heads: int) -> int:
    """Shares that a long sequence is cut into: a power of two, by the model alone."""
    return max(1, min(MOST_SPLITS, next_power_of_2(-(-PROGRAMS // kv_heads))))


class Parts(NamedTuple):
    """Output and partial results of a step: one share a sequence writes `out` itself, several are joined.

    Attributes:
        out: `[rows, heads, head_dim]`. shares: of a sequence.
        part: float32 `[rows, shares, heads, head_dim]`. extent: float32 `[rows, shares, heads]`, base-2 logarithms of sums of exponentials.
    """

    out: Tensor
    shares: int
    part: Tensor
    extent: Tensor

    @classmethod
    def of(cls, q: Tensor, kv_heads: int) -> Parts:
        """For queries `[rows, heads, head_dim]`."""
        rows, heads, size = q.shape
        out, count = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device), splits(kv_heads)
        if count == 1:
            return cls(out, count, out, out)
        part = torch.empty(rows, count, heads, size, dtype=torch.float32, device=q.device)
        return cls(out, count, part, torch.empty(rows, count, heads, dtype=torch.float32, device=q.device))

    def join(self, positions: Tensor, window: int, block: int, least: int) -> Tensor:
        """`out`, of shares of `least` blocks or more."""
        rows, heads, size = self.out.shape
        if self.shares > 1:
            join_kernel[(rows, heads)](
                self.part, self.extent, positions, self.out, window,
                SIZE=size, BLOCK_D=max(16, next_power_of_2(size)), BLOCK=block, SPLITS=self.shares, LEAST=least,
                WINDOWED=window > 0, num_warps=2,
            )  # fmt: skip
        return self.out


def decode_attention(
    q: Tensor, layer: CacheLayer, tables: Tensor, positions: Tensor, scale: float, window: int, width: int | None = None
) -> Tensor:
    """`ops.decode_attention`, its reference. Nothing behind a row's position is read, so `width` does not matter."""
    keys, values, _ = layer
    rows, heads, size = q.shape
    page, kv_heads = keys.shape[1:3]
    parts = Parts.of(q, kv_heads)
    if rows == 0:
        return parts.out
    wide = q.element_size() == 4  # float32 is multiplied without tensor cores, and takes twice the registers
    block = min(16 if wide else 64, page)
    if page % block or block < 16 or block & (block - 1):
        raise ValueError(f"pages of 16, 32, or a multiple of 64 positions, not {page}")
    group = heads // kv_heads
    split_kernel[(rows, kv_heads, parts.shares)](
        q, keys, values, tables, positions, parts.out, parts.part, parts.extent,
        q.stride(0), keys.stride(0), keys.stride(1), tables.stride(0), scale * 1.4426950408889634, window,
        GROUP=group, ROWS=max(16, next_power_of_2(group)), SIZE=size, BLOCK_D=max(16, next_power_of_2(size)), PAGE=page,
        BLOCK=block, SPLITS=parts.shares, LEAST=LEAST_SHARE, WINDOWED=window > 0, STAGES=2 if wide else 3,
        num_warps=8 if wide else 4,
    )  # fmt: skip
    return parts.join(positions, window, block, LEAST_SHARE)
