"""The types of attention.h: pages of keys and values, and attention of one layer over them."""

from __future__ import annotations

import ctypes

from runtime.kernels.cpu.library import fields

PAGE = 64  # positions of a page of the KV cache
MOST_CHANNELS = 1024  # of a head

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


#: What pages hold, beside the floats of `library.TYPES`.
KINDS = {"int8": 4, "int4": 5, "int2": 6, "fp8": 7}


class Storage(ctypes.Structure):
    """How pages are stored that are no longer recent; see kv_store.h."""

    _fields_ = (
        *fields(_p, "plain_at"),
        *fields(_i32, "key_kind", "value_kind", "group", "first"),
        *fields(_i64, "recent"),
        ("advise", _p),
        ("mapped", _i64),
    )


class Cache(ctypes.Structure):
    """Pages of one layer: plain keys `[pages, heads, head_dim, PAGE]` and values `[pages, heads, PAGE, value_dim]`, and stored ones."""

    _fields_ = (
        *fields(_p, "key", "value", "stored"),
        *fields(_i32, "type", "heads", "head_dim", "value_dim"),
        *fields(Storage, "storage"),
        *fields(_p, "bounds"),
    )


class Ragged(ctypes.Structure):
    """What eviction has left of a sequence where layers and heads keep different numbers of tokens; see kv_store.h."""

    _fields_ = (*fields(_p, "blocks", "counts", "first", "from_"), *fields(_i64, "apart", "lead", "packed"))


class Attention(ctypes.Structure):
    """Every row and head of a step in one layer."""

    _fields_ = (
        *fields(Cache, "cache"),
        *fields(_i64, "rows", "heads", "window", "pages_stride"),
        *fields(_p, "sequence", "position", "base", "path", "slots", "pages"),
        *fields(_p, "query", "out", "sinks"),
        *fields(_f32, "scale", "softcap"),
        *fields(_p, "memory", "ragged"),
        ("layer", _i64),
        *fields(_p, "chosen"),
    )
