"""The types of attention.h: pages of keys and values, and attention of one layer over them."""

from __future__ import annotations

import ctypes

from runtime.kernels.cpu.library import fields

PAGE = 64  # positions of a page of the KV cache

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Cache(ctypes.Structure):
    """Pages of one layer: keys `[pages, heads, head_dim, PAGE]`, values `[pages, heads, PAGE, value_dim]`."""

    _fields_ = (*fields(_p, "key", "value"), *fields(_i32, "type", "heads", "head_dim", "value_dim"))


class Attention(ctypes.Structure):
    """Every row and head of a step in one layer."""

    _fields_ = (
        *fields(Cache, "cache"),
        *fields(_i64, "rows", "heads", "window", "pages_stride"),
        *fields(_p, "sequence", "position", "base", "path", "slots", "pages"),
        *fields(_p, "query", "out", "sinks"),
        *fields(_f32, "scale", "softcap"),
    )
