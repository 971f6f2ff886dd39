"""Attention of chunks of prompts over pages (FlashAttention through a block table): grouped queries, ragged chunks, sliding windows.

A program owns one key/value head of one chunk and a tile of the queries that read it: token after token, for each the heads of the
group, packed without gaps. So a short chunk fills a tile with fewer tokens of more heads, a group needs not be a power of two, and
fewer blocks lie on the diagonal, at no more loads of keys than with a head a program.

Blocks of keys lie at multiples of their size from the sequence's first position, all tiles have one size, and a block that a query does
not see leaves its sums as they are: numbers of a token do not depend on how its prompt was cut, nor on what else is in the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.engines.cuda import stored_pages
from runtime.engines.cuda.cache import CacheLayer, Chunks
from runtime.kernels.triton.jit import entry, jit, next_power_of_2, tl


@jit
def _attend(
    state, query, positions, keys, values, pages, first, end, lowest, highest, page_stride, token_stride, scale, window,
    SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over blocks `first` to `end` of keys: largest scores, sums of weights, sums of weighted values.

    `lowest` and `highest` are the least and the largest of the queries' positions.
    """
    most, total, sums = state
    d, n = tl.arange(0, query.shape[1]), tl.arange(0, BLOCK)
    # Loaded in the iteration before, so that copies that are ahead need not wait for it.
    page = tl.load(pages + first * BLOCK // PAGE, mask=first < end, other=0)
    for block in tl.range(first, end, num_stages=STAGES):
        base = page.to(tl.int64) * page_stride + (block * BLOCK % PAGE + n) * token_stride
        page = tl.load(pages + (block + 1) * BLOCK // PAGE, mask=block + 1 < end, other=0)
        there = (d < SIZE)[None, :]
        if MASKED:  # what no query sees may never have been written, and 0 * NaN is NaN
            there = there & (block * BLOCK + n <= highest)[:, None]
            if WINDOWED:
                there = there & (block * BLOCK + n > lowest - window)[:, None]
        k = tl.load(keys + base[:, None] + d[None, :], mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = (block * BLOCK + n)[None, :] <= positions[:, None]
            if WINDOWED:
                seen = seen & ((block * BLOCK + n)[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1) * scale)  # the scale brings log2(e) along
        finite = higher
        if MASKED and WINDOWED:  # a query may see nothing of its tile's first blocks
            finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - finite[:, None])
        fade = tl.exp2(most - finite)
        v = tl.load(values + base[:, None] + d[None, :], mask=there, other=0.0)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision=PRECISION)
        most = higher
    return most, total, sums


@jit
def _own(tile, head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile's queries: tokens in the chunk, heads, and whether they exist; past the end, tokens are the last one."""
    # Volatile: loaded at every call, see the second one.
    count, first = tl.load(tile + 2, volatile=True), tl.load(tile + 4, volatile=True)
    query = first + tl.arange(0, ROWS)
    return tl.minimum(query // GROUP, count - 1), head * GROUP + query % GROUP, query < count * GROUP


@entry
def chunk_kernel(
    q, keys, values, pages, tiles, out,
    q_stride, page_stride, token_stride, scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, head = tiles + tl.program_id(0) // KV_HEADS * 5, tl.program_id(0) % KV_HEADS
    row, start = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    d = tl.arange(0, BLOCK_D)
    token, column, own = _own(tile, head, GROUP, ROWS)
    at = (row + token)[:, None] * q_stride + column[:, None] * SIZE + d[None, :]
    query = tl.load(q + at, mask=own[:, None] & (d < SIZE)[None, :], other=0.0)
    positions = start + token
    count, first_query = tl.load(tile + 2), tl.load(tile + 4)
    lowest, highest = start + first_query // GROUP, start + tl.minimum((first_query + ROWS - 1) // GROUP, count - 1)
    keys += head * SIZE
    values += head * SIZE
    pages += tl.load(tile + 3)
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, BLOCK_D], tl.float32),
    )
    # Blocks from `first` to `whole` are seen whole by every query.
    first, whole, end = 0, (lowest + 1) // BLOCK, highest // BLOCK + 1
    if WINDOWED:
        begin = tl.maximum(lowest + 1 - window, 0) // BLOCK
        first = tl.minimum(tl.cdiv(tl.maximum(highest + 1 - window, 0), BLOCK), end)
        whole = tl.maximum(whole, first)
        state = _attend(
            state, query, positions, keys, values, pages, begin, first, lowest, highest, page_stride, token_stride, scale, window,
            SIZE, PAGE, BLOCK, True, WINDOWED, PRECISION, STAGES,
        )  # fmt: skip
    state = _attend(
        state, query, positions, keys, values, pages, first, whole, lowest, highest, page_stride, token_stride, scale, window,
        SIZE, PAGE, BLOCK, False, WINDOWED, PRECISION, STAGES,
    )  # fmt: skip
    _, total, sums = _attend(
        state, query, positions, keys, values, pages, whole, end, lowest, highest, page_stride, token_stride, scale, window,
        SIZE, PAGE, BLOCK, True, WINDOWED, PRECISION, STAGES,
    )  # fmt: skip
    y = sums / total[:, None]
    token, column, own = _own(tile, head, GROUP, ROWS)  # anew: kept since the first call, addresses take 50 registers
    at = ((row + token)[:, None] * (KV_HEADS * GROUP) + column[:, None]) * SIZE + d[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=own[:, None] & (d < SIZE)[None, :])


def chunk_attention(q: Tensor, layer: CacheLayer, chunks: Chunks, scale: float, window: int) -> Tensor:
    """`ops.chunk_attention`, its reference. Chunks that read a page in few bits are computed in torch, one by one."""
    stored = layer.stored
    if stored is None:
        return _over_plain_pages(q, layer, chunks, scale, window)
    parts = dict(enumerate(q.split(chunks.counts)))
    numbers, plain = chunks.plain(stored)
    if plain is not None:
        found = _over_plain_pages(torch.cat([parts[i] for i in numbers]), layer, plain, scale, window)
        parts |= dict(zip(numbers, found.split(plain.counts), strict=True))
    for i in parts.keys() - set(numbers):
        parts[i] = stored_pages.chunk_attention(parts[i], layer, chunks.tables[i], chunks.starts[i], scale)
    return torch.cat(list(parts.values()))


def _over_plain_pages(q: Tensor, layer: CacheLayer, chunks: Chunks, scale: float, window: int) -> Tensor:
    keys, values, _ = layer
    rows, heads, size = q.shape
    page, kv_heads = keys.shape[1:3]
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    wide, channels, group = q.element_size() == 4, max(16, next_power_of_2(size)), heads // kv_heads
    # Float32 takes three products of TF32 for each, and twice the registers. Rows do not follow from the chunks: see above.
    most, block = (max(16, min(each, each * 128 // channels)) for each in ((32, 32) if wide else (128, 64)))
    block = min(block, page)
    if page % block or block < 16 or block & (block - 1):
        raise ValueError(f"pages of 16, 32, or a multiple of 64 positions, not {page}")
    tiles = chunks.tiles(most, group)
    chunk_kernel[(len(tiles) * kv_heads,)](
        q, keys, values, chunks.pages, tiles, out,
        q.stride(0), keys.stride(0), keys.stride(1), scale * 1.4426950408889634, window,
        KV_HEADS=kv_heads, GROUP=group, ROWS=most, SIZE=size, BLOCK_D=channels, PAGE=page, BLOCK=block,
        WINDOWED=window > 0, PRECISION="tf32x3" if wide else "ieee", STAGES=3, num_warps=8,
    )  # fmt: skip
    return out
