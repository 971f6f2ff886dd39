"""Split-KV attention over a region in Triton: flash-decoding that reads compressed pages. Importing this file needs no triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runtime.kernels.triton import gpu
from runtime.kernels.triton.jit import INSTALLED, cdiv, entry, next_power_of_2, tl
from runtime.kernels.triton.tuning import interpreted
from runtime.kv_cache.kernels.triton_split import split_kernel
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Queries, Region
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.bitmap import Bitmap
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain

# Joins the shares of a row that `triton_split.py` computed.


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


NAME = "kv-triton"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_SIZE = 256
LEAST_SHARE = 4  # pages: with fewer, partial results would be a large part of the traffic
MOST_SPLITS = 128
MULTIPROCESSORS = 132  # where no GPU is there to ask
PROGRAMS = 8  # wanted on a multiprocessor
_LOG2E = 1.4426950408889634


def why_not(query: torch.Tensor, region: Region) -> str | None:
    """Why `run` cannot compute this; None when it can. `query` is that of `run`."""
    if not INSTALLED:
        return "triton is not installed"
    if query.device.type != "cuda" and not interpreted():
        return "triton's kernels run on CUDA devices"
    if gpu.capability(query.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if query.dtype not in FLOATS or region.dtype not in FLOATS:
        return f"it knows float32, float16 and bfloat16, not queries in {query.dtype} with floats in {region.dtype}"
    if max(region.sizes) > MOST_SIZE:
        return f"it takes heads of up to {MOST_SIZE} channels, not {max(region.sizes)}"
    for codec in region.codecs.values():
        if type(codec) not in (Plain, Bitmap, Float8, Integer):
            return f"it does not read {codec.name}"
    if any(pool.device != query.device for pool in region.pools.values()):
        return "the cache lies on another device than the queries"
    return None


def run(
    queries: Queries, region: Region, visible: torch.Tensor | None = None, chosen: Chosen | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `region_attention`, its reference, where `why_not` has no objection: float32 `[rows, m, value size]` and `[rows, m]`.

    Nothing is read but tokens that some query sees, and no copy of them is made. Rows may have as many pages as they like; how a row
    is cut into shares depends on its length, on the longest and on the number of rows, and so do the last bits of the result.

    Args:
        queries: m of each row, the last dimension dense or copied. Of another dtype than the region's floats (a model in float32
            whose cache is in bfloat16), they are multiplied in float32: states become that in registers, and nothing is rounded.
        region: what is attended to.
        visible: int64 `[rows, m]`.
        chosen: of unit PAGE or 1.
    """
    query, softcap = queries.states, queries.softcap
    rows, m = query.shape[:2]
    v_size = region.sizes[1]
    tiles = cdiv(region.longest, PAGE)
    if chosen is not None:
        most = chosen.index.shape[1]
        tiles = min(tiles, most if chosen.unit == PAGE else cdiv(most, PAGE))
    shape = (rows, m)
    if not rows or not m or not tiles:
        out = torch.zeros(*shape, v_size, dtype=torch.float32, device=query.device)
        return out, torch.full(shape, float("-inf"), dtype=torch.float32, device=query.device)
    if query.dtype != region.dtype:
        query = query.float()
    query = _dense(query)
    keys, values = (
        constants(codec, size, region.parts[f"{side}.codes"].width)
        for (side, codec), size in zip(region.codecs.items(), region.sizes, strict=True)
    )
    kind = "all" if chosen is None else "pages" if chosen.unit == PAGE else "tokens"
    options = _options(query, (keys, values), kind == "tokens")
    slices = cdiv(m, options["ROWS"])
    count = splits(rows * slices, tiles, _multiprocessors(query.device))
    out = torch.empty(*shape, v_size, dtype=torch.float32, device=query.device)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    part, extent = out, lse
    if count > 1:
        part = torch.empty(rows, count, m, v_size, dtype=torch.float32, device=query.device)
        extent = torch.empty(rows, count, m, 2, dtype=torch.float32, device=query.device)
    lengths, table = region.lengths, _dense(region.table)
    index, counts = (lengths, lengths) if chosen is None else (_dense(chosen.index), chosen.counts)
    limit = lengths if visible is None else _dense(visible)
    # Weights times scale could be too small for float16, whose values are restored as the model would have them.
    folded = values["GRID"] == "token" and query.dtype != torch.float16
    split_kernel[(rows, count, slices)](
        query, *operands(region.pools_of("keys")), *operands(region.pools_of("values")), region.pools["bias"] if region.has_bias else lse,
        table, lengths, limit, index, counts, out, lse, part, extent,
        query.stride(0), query.stride(1), table.stride(0), index.stride(0), limit.stride(0), m,
        *_factors(queries.scale, softcap), SPLITS=count, LEAST=LEAST_SHARE, PAGE=PAGE,
        **{f"K_{name}": value for name, value in keys.items()},
        **{f"V_{name}": value for name, value in values.items()}, V_FOLDED=folded,
        HAS_BIAS=region.has_bias, HAS_VISIBLE=visible is not None, CHOSEN=kind, CAPPED=softcap != 0, **options,
    )  # fmt: skip
    if count > 1:
        merge_kernel[(rows, m)](
            part, extent, out, lse, m,
            SIZE=v_size, WIDTH=next_power_of_2(v_size), SPLITS=count, CHUNK=min(count, 8), num_warps=2,
        )  # fmt: skip
    return out, lse


def splits(rows: int, tiles: int, multiprocessors: int) -> int:
    """Shares of a row of so many tiles of tokens: a power of two, as many as fill the GPU unless they became too small."""
    wanted = min(cdiv(PROGRAMS * multiprocessors, rows), cdiv(tiles, LEAST_SHARE), MOST_SPLITS)
    return 1 << (wanted.bit_length() - 1)


def _options(query: torch.Tensor, stored: Sequence[Mapping[str, Any]], gathered: bool) -> dict[str, int]:
    """How the split kernel is compiled for keys and values with such `constants`, that little or nothing spills."""
    width = max(each["WIDTH"] * 8 // each["BITS"] for each in stored)
    wide = query.element_size() == 4  # multiplied as tf32 in three parts
    # More queries than a program has registers for are slices, which read the same keys and values.
    rows = min(max(16, next_power_of_2(query.shape[1])), 16 if wide else 64 if width <= 128 else 32)
    heavy = 4 if wide else 1
    if gathered and not wide:  # which takes an address a token; of bitmaps there are two
        heavy = 4 if any(each["KIND"] == "bitmap" for each in stored) else 2
    warps = 2 * min(4, max(1, rows * width * heavy // 2048))
    return {"ROWS": rows, "STAGES": 3 if not wide else 2 if width <= 128 else 1, "num_warps": warps}


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """What scores are multiplied with, and the cap; both for powers of 2 instead of e (see the kernel)."""
    if softcap:
        return float(2 * scale / softcap * _LOG2E), float(softcap * _LOG2E)
    return float(scale * _LOG2E), 0.0


def constants(codec: Codec, size: int, stored: int) -> dict[str, Any]:
    """The kernels' constants for keys or values of `size` channels, of which a token has `stored` elements."""
    found = {"SIZE": size, "STORED": stored, "KIND": codec.name, "BITS": 8, "GRID": "none", "GROUP": size}
    if isinstance(codec, Float8):
        found["GRID"] = "token"
    elif isinstance(codec, Integer):
        grid = "channel" if codec.axis == "channel" else "token" if codec.groups(size) == 1 else "group"
        found |= {"KIND": "integer", "BITS": codec.bits, "GRID": grid, "GROUP": codec.group or size}
    elements = size if isinstance(codec, Bitmap) else stored
    return found | {"WIDTH": max(16, next_power_of_2(elements))}


def operands(pools: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales (of bitmaps: masks) and zeros of keys or values; codes stand in where there are none.

    Float8 as its bits, which GPUs before compute capability 8.9 can load.
    """
    codes = pools["codes"]
    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    scale = pools.get("mask", pools.get("scale", codes))
    return codes, scale, pools.get("zero", codes)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
