"""Attention over a region on a CPU, in C: keys and values are decoded in registers, a block of codes once for all queries.

The sources are in `c/`; the threads are torch's own (see runtime/kernels/cpu/library.py). Sums are float32.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Hashable
from functools import cache, lru_cache
from pathlib import Path
from typing import cast

import torch

from runtime.kernels.cpu import library as linear
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Queries, Region
from runtime.kv_cache.storage.base import BLOCK
from runtime.kv_cache.storage.bitmap import Bitmap
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain
from runtime.system import instruction_sets, native

NAME = "kv-cpu"
SOURCE = Path(__file__).parent / "c" / "attention.c"
#: Headers that these kernels share with those of linear layers.
_SHARED = (*sorted(linear.SOURCE.parent.glob("simd*.h")), linear.SOURCE.parent / "pool.h")
_FP8, _BITMAP, _INTEGERS = 3, 7, {2: 4, 4: 5, 8: 6}
_NO_GRID, _CHANNEL, _TOKEN = 0, 1, 2
_CHUNK = 16  # channels that the inner loops take at once

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Side(ctypes.Structure):
    """`Side` of region.h."""

    _fields_ = (
        *linear.fields(_i32, "kind", "type", "grid", "groups"),
        *linear.fields(_i64, "group", "size", "wide", "stride", "mask_stride"),
        *linear.fields(_i32, "tile", "chunks"),
        *linear.fields(_p, "codes", "mask", "scale", "zero"),
    )


class Request(ctypes.Structure):
    """`Request` of region.h."""

    _fields_ = (
        *linear.fields(Side, "key", "value"),
        *linear.fields(_i64, "rows", "queries", "columns", "most", "unit"),
        *linear.fields(_f32, "scale", "softcap"),
        *linear.fields(_p, "query", "table", "lengths", "visible", "index", "counts", "bias", "out", "lse", "memory"),
    )


@cache
def load(portable: bool = False) -> ctypes.CDLL | None:
    """The library for this machine's vectors, or (`portable`) for none in particular; None without a compiler."""
    # A library is named by the hash of its folder and its flags; headers from elsewhere must show in one of them.
    shared = hashlib.sha256(b"".join(file.read_bytes() for file in _SHARED)).hexdigest()[:16]
    tunings = instruction_sets.tunings(instruction_sets.PORTABLE) if portable else native.tunings()
    library = native.library(SOURCE, tuple((f"-DSHARED_{shared}", *tuning) for tuning in tunings))
    if library is None:
        return None
    library.attention_prepare()
    for function, result in ((library.attention_memory, _i64), (library.attention_run, None)):
        function.restype, function.argtypes = result, [_p, _i32]
    functions = linear.openmp()
    if functions is not None:
        library.set_pool(*functions)
    return library


def why_not(query: torch.Tensor, region: Region) -> str | None:
    """Why `run` cannot take them, or None."""
    if load() is None:
        return "there is no C compiler, or COMPRESS_NATIVE=0 is set"
    if query.device.type != "cpu" or query.dtype not in linear.TYPES:
        return f"it takes queries in float32, bfloat16 or float16 on a CPU, not {query.dtype} on {query.device}"
    if query.requires_grad and torch.is_grad_enabled():
        return "it has no gradients"
    for codec in region.codecs.values():
        if type(codec) not in (Plain, Integer, Float8, Bitmap):
            return f"it does not know storage {codec.name}"
    for tensor in (*region.pools.values(), region.table, region.lengths):
        if not tensor.is_cpu or not tensor.is_contiguous():
            return "its pages are not contiguous in the CPU's memory"
    if region.dtype not in linear.TYPES:
        return f"it does not know {region.dtype}"
    return None


def run(
    queries: Queries,
    region: Region,
    visible: torch.Tensor | None = None,
    chosen: Chosen | None = None,
    portable: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `region_attention`, for what `why_not` has nothing against; a score that is NaN or infinite makes NaN.

    Args:
        queries: float32, bfloat16 or float16, m of each row.
        portable: by the library of plain C.

    Raises:
        ValueError: tensors do not fit each other.
    """
    library = load(portable)
    assert library is not None
    rows, m, size = queries.states.shape
    if (rows, size) != (region.rows, region.sizes[0]):
        raise ValueError(f"queries {tuple(queries.states.shape)} for {region.rows} rows of size {region.sizes[0]}")
    # Whatever is made here must live until the call is over: C gets addresses.
    query = queries.states.detach().float().contiguous()
    seen = None if visible is None else _int64(visible, (rows, m), "visible")
    index, counts, most, unit = None, None, 0, PAGE
    if chosen is not None:
        most, unit = chosen.index.shape[-1], chosen.unit
        if chosen.unit not in (1, PAGE):
            raise ValueError(f"chosen.unit is {chosen.unit}, not 1 or {PAGE}")
        index = _int64(chosen.index, (rows, most), "chosen.index")
        counts = _int64(chosen.counts, (rows,), "chosen.counts")
    out = torch.empty(rows, m, region.sizes[1], dtype=torch.float32)
    lse = torch.empty(rows, m, dtype=torch.float32)
    tensors = query, region.table, region.lengths, seen, index, counts, region.pools.get("bias"), out, lse
    request = Request(
        *(_side(region, side) for side in region.codecs),
        *(rows, m, region.table.shape[1], most, unit, queries.scale, queries.softcap),
        # Not null where there are no numbers: null says that there is no tensor.
        *(None if tensor is None else tensor.data_ptr() or 1 for tensor in tensors),
    )
    if out.numel() == 0 or lse.numel() == 0:
        return out, lse.fill_(float("-inf"))
    threads = torch.get_num_threads()
    request.memory = linear.bytes_at(library.attention_memory(ctypes.byref(request), threads))
    library.attention_run(ctypes.byref(request), threads)
    return out, lse


def _int64(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, not {shape}")
    return tensor.to("cpu", torch.int64).contiguous()


def _side(region: Region, side: str) -> Side:
    """The "keys" or "values" of a region as the C code sees them; its pointers have the names of the codecs' parts."""
    pools = region.pools_of(side)
    codes, size = pools["codes"], region.sizes[side == "values"]
    layout = _layout(cast(Hashable, region.codecs[side]), size, codes.dtype, codes.shape[-1])
    return Side(*layout, **{name: pool.data_ptr() for name, pool in pools.items()})


@lru_cache(maxsize=256)
def _layout(codec: Hashable, size: int, dtype: torch.dtype, width: int) -> tuple[int, ...]:
    """The numbers of a `Side`, kind to chunks, for codes of `dtype`, `width` a token."""
    wide, kind, of, grid, groups, group, mask = -(-size // BLOCK) * BLOCK, 0, 0, _NO_GRID, 1, size, 0
    chunks, tile = size // _CHUNK, bool(size % _CHUNK)
    if isinstance(codec, Integer):
        kind, grid = _INTEGERS[codec.bits], _CHANNEL if codec.axis == "channel" else _TOKEN
        chunks, tile = -(-size // _CHUNK), False  # codes are padded to whole blocks, with zeros
        if codec.axis == "token":
            groups, group = codec.groups(size), codec.group or size
            tile = groups > 1 and bool(group % _CHUNK)
    elif isinstance(codec, Float8):
        kind, grid = _FP8, _TOKEN
    elif isinstance(codec, Bitmap):
        kind, of, tile, mask = _BITMAP, linear.TYPES[dtype], True, -(-size // 8)
    else:
        kind = linear.TYPES[dtype]
    return kind, of, grid, groups, group, size, wide, width * dtype.itemsize, mask, int(tile), chunks
