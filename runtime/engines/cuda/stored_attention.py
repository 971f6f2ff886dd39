"""Attention of one query a sequence over pages of which the older are stored in few bits: no copy of them is made.

As `paged_attention.py`, with blocks of 32 positions. A program reads those of its share that are stored, then those that are plain: the
first pages of a sequence where the policy says so, and the recent ones. What is stored follows from the position alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.engines.cuda.cache import CacheLayer
from runtime.engines.cuda.paged_attention import Parts
from runtime.kernels.triton.jit import entry, jit, next_power_of_2, tl
from runtime.kv_cache.kernels.triton_attention import constants, operands
from runtime.kv_cache.kernels.triton_split import add_values, channels, key_scores
from runtime.kv_cache.pages import PAGE as BLOCK

LEAST_SHARE = 4  # blocks of a share


@jit
def _softmax(scores, most, total):
    """A step of the online softmax: the block's weights, the new largest score and sum, and the factor for earlier sums."""
    higher = tl.maximum(most, tl.max(scores, 1))  # finite: every block has a position that is seen
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(most - higher)
    return weights, higher, total * fade + tl.sum(weights, 1), fade


@entry
def stored_split_kernel(
    q, keys, values, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, places, tables, positions, out, part, extent,
    q_stride, table_stride, scale, recent,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    K_SIZE: tl.constexpr, K_STORED: tl.constexpr, K_WIDTH: tl.constexpr, K_KIND: tl.constexpr, K_BITS: tl.constexpr,
    K_GRID: tl.constexpr, K_GROUP: tl.constexpr,
    V_SIZE: tl.constexpr, V_STORED: tl.constexpr, V_WIDTH: tl.constexpr, V_KIND: tl.constexpr, V_BITS: tl.constexpr,
    V_GRID: tl.constexpr, V_GROUP: tl.constexpr, V_FOLDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1), tl.program_id(2)
    TYPE: tl.constexpr = q.dtype.element_ty
    BLOCKS: tl.constexpr = PAGE // BLOCK  # of a page
    K_FIELDS: tl.constexpr = 8 // K_BITS
    V_FIELDS: tl.constexpr = 8 // V_BITS
    position = tl.load(positions + row)
    blocks = position // BLOCK + 1
    share = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)
    begin = split * share
    if begin >= blocks:
        return
    end = tl.minimum(begin + share, blocks)
    first = FIRST * BLOCKS
    whole = tl.maximum(tl.maximum(position - recent, 0) // PAGE, FIRST) * BLOCKS  # blocks first .. whole - 1 are stored
    m, n = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    base = q + row * q_stride + (head * GROUP + m)[:, None] * SIZE
    queries = ()
    of_queries = tl.zeros([ROWS], tl.float32)
    for f in tl.static_range(K_FIELDS):
        k_channel = channels(f, K_FIELDS, K_WIDTH)
        own = (m < GROUP)[:, None] & (k_channel < SIZE)[None, :]
        loaded = tl.load(base + k_channel[None, :], mask=own, other=0.0)
        queries += (loaded,)  # type: ignore[assignment]
        of_queries += tl.sum(loaded.to(tl.float32), 1)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    of_zeros = tl.zeros([ROWS], tl.float32)
    sums = ()
    for _ in tl.static_range(V_FIELDS):
        sums += (tl.zeros([ROWS, V_WIDTH], tl.float32),)  # type: ignore[assignment]

    for block in tl.range(tl.maximum(begin, first), tl.minimum(end, whole), num_stages=STAGES):
        page = tl.load(tables + row * table_stride + block // BLOCKS).to(tl.int64)
        page = (page * KV_HEADS + head) * BLOCKS + block % BLOCKS
        slots = page * BLOCK + n
        seen = n >= 0
        scores = key_scores(
            queries, of_queries, k_codes, k_scale, k_zero, page, slots, seen,
            K_SIZE, K_STORED, K_WIDTH, K_KIND, K_BITS, K_GRID, K_GROUP, False, TYPE,
        )  # fmt: skip
        weights, most, total, fade = _softmax(scores * scale, most, total)
        sums, of_zeros = add_values(
            sums, of_zeros, weights, fade, v_codes, v_scale, v_zero, page, slots, seen,
            V_SIZE, V_STORED, V_WIDTH, V_KIND, V_BITS, V_GRID, V_GROUP, V_FOLDED, False, TYPE,
        )  # fmt: skip

    before = tl.maximum(tl.minimum(end, first) - begin, 0)
    later = tl.maximum(begin, whole)
    for i in tl.range(0, before + tl.maximum(end - later, 0), num_stages=STAGES):
        block = tl.where(i < before, begin + i, later + i - before)
        place = tl.load(places + tl.load(tables + row * table_stride + block // BLOCKS)).to(tl.int64)
        slots = (place * PAGE + block % BLOCKS * BLOCK + n) * KV_HEADS + head
        seen = block * BLOCK + n <= position
        scores = tl.zeros([ROWS, BLOCK], tl.float32)
        for f in tl.static_range(K_FIELDS):
            k_channel = channels(f, K_FIELDS, K_WIDTH)
            there = seen[:, None] & (k_channel < SIZE)[None, :]
            k = tl.load(keys + slots[:, None] * SIZE + k_channel[None, :], mask=there, other=0.0)
            scores = tl.dot(queries[f], tl.trans(k), scores, input_precision="tf32x3")
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        weights, most, total, fade = _softmax(scores, most, total)
        weights = weights.to(TYPE)
        added = ()
        for f in tl.static_range(V_FIELDS):
            v_channel = channels(f, V_FIELDS, V_WIDTH)
            there = seen[:, None] & (v_channel < SIZE)[None, :]
            v = tl.load(values + slots[:, None] * SIZE + v_channel[None, :], mask=there, other=0.0)
            added += (tl.dot(weights, v, sums[f] * fade[:, None], input_precision="tf32x3"),)  # type: ignore[assignment]
        sums, of_zeros = added, of_zeros * fade

    place = (row * SPLITS + split) * KV_HEADS * GROUP + head * GROUP + m
    for f in tl.static_range(V_FIELDS):
        v_channel = channels(f, V_FIELDS, V_WIDTH)
        own = (m < GROUP)[:, None] & (v_channel < SIZE)[None, :]
        result = (sums[f] + of_zeros[:, None]) / total[:, None]
        if SPLITS == 1:
            tl.store(out + place[:, None] * SIZE + v_channel[None, :], result.to(out.dtype.element_ty), mask=own)
        else:
            tl.store(part + place[:, None] * SIZE + v_channel[None, :], result, mask=own)
    if SPLITS > 1:
        tl.store(extent + place, most + tl.log2(total), mask=m < GROUP)


def decode_attention(
    q: Tensor, layer: CacheLayer, tables: Tensor, positions: Tensor, scale: float, window: int, width: int | None = None
) -> Tensor:
    """`ops.decode_attention`, its reference, of a layer with stored pages."""
    stored = layer.stored
    assert stored is not None
    size = q.shape[-1]
    page, kv_heads = layer.keys.shape[1:3]
    group, parts = q.shape[1] // kv_heads, Parts.of(q, kv_heads)
    if not len(q):
        return parts.out
    sides = {
        side: constants(codec, size, stored.pools[f"{side}.codes"].shape[-1]) for side, codec in stored.codecs.items()
    }
    keys, values = sides["keys"], sides["values"]
    most_rows, wide = max(16, next_power_of_2(group)), q.element_size() == 4
    width = max(each["WIDTH"] * 8 // each["BITS"] for each in sides.values())
    warps = 2 * min(4, max(1, most_rows * width * (4 if wide else 1) // 2048))
    # Weights times scale could be too small for float16, whose values are restored as the model would have them.
    folded = values["GRID"] == "token" and q.dtype != torch.float16
    stored_split_kernel[(len(q), kv_heads, parts.shares)](
        q, layer.keys, layer.values, *operands(stored.pools_of("keys")), *operands(stored.pools_of("values")),
        stored.places, tables, positions, parts.out, parts.part, parts.extent,
        q.stride(0), tables.stride(0), scale * 1.4426950408889634, stored.recent,
        KV_HEADS=kv_heads, GROUP=group, ROWS=most_rows, SIZE=size, PAGE=page, FIRST=stored.first, BLOCK=BLOCK,
        SPLITS=parts.shares, LEAST=LEAST_SHARE,
        **{f"K_{name}": value for name, value in keys.items()},
        **{f"V_{name}": value for name, value in values.items()}, V_FOLDED=folded,
        STAGES=1 if wide else 3, num_warps=warps,
    )  # fmt: skip
    return parts.join(positions, 0, BLOCK, LEAST_SHARE)
