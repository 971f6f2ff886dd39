"""Storing of pages that are no longer recent: one launch a side, of all layers or one, which reads nothing back.

A program takes a block of 32 tokens of one key/value head. Its codes are those of the codecs in `runtime.kv_cache.storage`, unless sums of
squared errors in another order make another range of an integer grid the best.
"""

from __future__ import annotations

import torch

from runtime.engines.cuda.cache import StoredLayers
from runtime.kernels.triton.jit import entry, jit, next_power_of_2, tl
from runtime.kv_cache.pages import PAGE as BLOCK
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer

RANGES = {2: 9, 4: 4, 8: 1}
"""By bits: how many ranges are tried, each a twentieth of the whole one narrower than the one before."""


@jit
def _round(x, scale, zero, BITS: tl.constexpr):
    """Codes, in float32."""
    step = scale.to(tl.float32)
    places = tl.div_rn(x - zero.to(tl.float32), tl.zeros_like(x) + tl.where(step == 0, 1.0, step))
    places = tl.minimum(tl.maximum(places, 0.0), (1 << BITS) - 1.0)
    return (places + 12582912.0) - 12582912.0  # to an integer, ties to an even one


@jit
def _grid(x, inside, AXIS: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr):
    """Scale and zero in float16 of the range with the least squared error, along AXIS of three."""
    low = tl.min(tl.where(inside, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(inside, x, float("-inf")), AXIS, keep_dims=True)
    MOST: tl.constexpr = (1 << BITS) - 1
    least = tl.full(low.shape, float("inf"), tl.float32)
    best_scale, best_zero = tl.zeros(low.shape, tl.float16), tl.zeros(low.shape, tl.float16)
    for i in tl.range(COUNT):  # unrolled, they would be computed side by side and spill
        zero = (low + (high - low) * (i * 0.025)).to(tl.float16)
        width = (high - low) * (1.0 - i * 0.05)
        scale = tl.div_rn(width, tl.zeros_like(width) + MOST).to(tl.float16)
        back = _round(x, scale, zero, BITS) * scale.to(tl.float32) + zero.to(tl.float32)
        error = tl.sum(tl.where(inside, (back - x) * (back - x), 0.0), AXIS, keep_dims=True)
        better = error < least
        least = tl.where(better, error, least)
        best_scale, best_zero = tl.where(better, scale, best_scale), tl.where(better, zero, best_zero)
    return best_scale, best_zero


@jit
def _float8_bits(x):
    """Bits of the nearest float8 (e4m3), ties to an even one, of float32 up to 448: for GPUs that have no instruction for it too."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (
        tl.abs(x) * 512.0 + 12582912.0
    ) - 12582912.0  # in units of the smallest; 8 of them are the first normal number
    return tl.where(size < (121 << 23), small.to(tl.int32), normal) | ((bits >> 24) & 0x80)


@entry
def page_store_kernel(
    plain, codes, scale, zero, places, pages, invalid, plain_layer, codes_layer, scale_layer,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, STORED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """GROUP: channels of a token that share a grid; 0: each channel has one, of all tokens of the block."""
    BLOCKS: tl.constexpr = PAGE // BLOCK
    page = tl.load(pages + tl.program_id(0))
    place = tl.load(places + page).to(tl.int64)
    head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    layer = tl.cast(tl.program_id(2), tl.int64)
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = ((place * PAGE + block * BLOCK + n) * KV_HEADS + head)[:, None] * SIZE + d[None, :]
    inside = (n >= 0)[:, None] & (d < SIZE)[None, :]
    loaded = tl.load(plain + layer * plain_layer + at, mask=inside, other=0.0)
    to = (page.to(tl.int64) * KV_HEADS + head) * BLOCKS + block  # the block, among those of the pool
    tokens = to * BLOCK + n
    codes += layer * codes_layer
    scale += layer * scale_layer
    if KIND == "plain":
        tl.store(codes + tokens[:, None] * STORED + d[None, :], loaded, mask=inside)
        return
    x = loaded.to(tl.float32)
    LIMIT: tl.constexpr = 65504.0 if KIND == "integer" else 3.4028234663852886e38
    wrong = tl.max(tl.max((inside & ~(tl.abs(x) <= LIMIT)).to(tl.int32), 1), 0)
    tl.atomic_max(invalid, wrong, mask=wrong > 0)  # many programs may have found one
    if KIND == "fp8":
        step = tl.maximum(
            tl.div_rn(tl.max(tl.abs(x), 1), tl.zeros([BLOCK], tl.float32) + 448.0), 1.1754943508222875e-38
        )
        value = tl.div_rn(x, tl.zeros_like(x) + step[:, None])
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        tl.store(codes + tokens[:, None] * STORED + d[None, :], _float8_bits(value).to(tl.uint8), mask=inside)
        tl.store(scale + tokens, step)
    else:
        zero += layer * scale_layer
        # Grids are along the first of three dimensions, or along the last.
        GROUPS: tl.constexpr = BLOCK_D if GROUP == 0 else BLOCK_D // GROUP
        MEMBERS: tl.constexpr = 1 if GROUP == 0 else GROUP
        AXIS: tl.constexpr = 0 if GROUP == 0 else 2
        x, there = tl.reshape(x, [BLOCK, GROUPS, MEMBERS]), tl.reshape(inside, [BLOCK, GROUPS, MEMBERS])
        step, start = _grid(x, there, AXIS, BITS, COUNT)
        if GROUP == 0:
            grid = to * SIZE + d
            tl.store(scale + grid, tl.reshape(step, [BLOCK_D]), mask=d < SIZE)
            tl.store(zero + grid, tl.reshape(start, [BLOCK_D]), mask=d < SIZE)
        else:
            g = tl.arange(0, GROUPS)
            GRIDS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
            grid = tokens[:, None] * GRIDS + g[None, :]
            tl.store(scale + grid, tl.reshape(step, [BLOCK, GROUPS]), mask=(g < GRIDS)[None, :])
            tl.store(zero + grid, tl.reshape(start, [BLOCK, GROUPS]), mask=(g < GRIDS)[None, :])
        code = tl.where(there, _round(x, step, start, BITS), 0.0).to(tl.int32)
        # As `pack_codes`: byte b of 32 channels holds the codes b, b + w, b + 2w, ... from its lowest bits up.
        FIELDS: tl.constexpr = 8 // BITS
        fields = tl.reshape(code, [BLOCK, BLOCK_D // 32, FIELDS, 4 * BITS])
        shift = (tl.arange(0, FIELDS) * BITS)[None, None, :, None]
        bytes_ = tl.reshape(tl.sum(fields << shift, 2), [BLOCK, BLOCK_D // FIELDS])
        b = tl.arange(0, BLOCK_D // FIELDS)
        tl.store(codes + tokens[:, None] * STORED + b[None, :], bytes_.to(tl.uint8), mask=(b < STORED)[None, :])


def store(stored: StoredLayers, pages: torch.Tensor) -> None:
    """`stored_pages.store`, its reference."""
    layers, _, page, heads, size = stored.keys.shape
    for (side, codec), plain in zip(stored.codecs.items(), (stored.keys, stored.values), strict=True):
        pools = stored.pools_of(side)
        codes = pools["codes"].view(torch.uint8) if isinstance(codec, Float8) else pools["codes"]
        scale = pools.get("scale", codes)
        block_d = max(32, next_power_of_2(size))
        page_store_kernel[(len(pages), heads * (page // BLOCK), layers)](
            plain, codes, scale, pools.get("zero", scale), stored.places, pages, stored.invalid,
            plain.stride(0), codes.stride(0), scale.stride(0),
            KV_HEADS=heads, SIZE=size, BLOCK_D=block_d, STORED=codes.shape[-1], PAGE=page, BLOCK=BLOCK,
            **_constants(codec, size, block_d),
        )  # fmt: skip


def _constants(codec: Codec, size: int, block_d: int) -> dict[str, str | int]:
    if not isinstance(codec, Integer):
        return {"KIND": codec.name, "BITS": 8, "GROUP": 0, "COUNT": 1, "num_warps": 4}
    of_token = block_d if codec.groups(size) == 1 else codec.group
    group = 0 if codec.axis == "channel" else of_token
    return {"KIND": "integer", "BITS": codec.bits, "GROUP": group, "COUNT": RANGES[codec.bits], "num_warps": 4}
