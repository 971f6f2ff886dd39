"""The types of decoder.h: a Llama-like decoder as C sees it, and one step of it."""

from __future__ import annotations

import ctypes

from runtime.kernels.cpu.library import Linear

PAGE = 64  # positions of a page of the KV cache (attention.h)
SKIP_ATTENTION, SKIP_MLP = 1, 2  # of `Block.skip`

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Block(ctypes.Structure):
    """One layer: its weights (addresses; whoever fills it keeps the tensors alive) and its part of the cache."""

    _fields_ = (
        ("query", Linear),
        ("key", Linear),
        ("value", Linear),
        ("output", Linear),
        ("gate", Linear),
        ("up", Linear),
        ("down", Linear),
        ("input_norm", _p),
        ("mlp_norm", _p),
        ("query_norm", _p),
        ("key_norm", _p),
        ("keys", _p),
        ("values", _p),
        ("window", _i64),
        ("skip", _i64),
    )


class Decoder(ctypes.Structure):
    """The whole model but the embedding."""

    _fields_ = (
        ("layers", _i64),
        ("hidden", _i64),
        ("intermediate", _i64),
        ("heads", _i64),
        ("kv_heads", _i64),
        ("head_dim", _i64),
        ("rotary", _i64),
        ("cache_type", _i32),
        ("digits", _i32),
        ("eps", _f32),
        ("scale", _f32),
        ("blocks", ctypes.POINTER(Block)),
        ("final_norm", _p),
        ("head", Linear),
    )


class Step(ctypes.Structure):
    """Some tokens of some sequences, through all layers."""

    _fields_ = (
        ("rows", _i64),
        ("outputs", _i64),
        ("pages_stride", _i64),
        ("first", _i64),
        ("last", _i64),
        ("x", _p),
        ("sequence", _p),
        ("position", _p),
        ("slot", _p),
        ("base", _p),
        ("path", _p),
        ("slots", _p),
        ("pages", _p),
        ("cosine", _p),
        ("sine", _p),
        ("output", _p),
        ("logits", _p),
        ("record", _p),
        ("memory", _p),
        ("decoder", ctypes.POINTER(Decoder)),
    )
