"""The types of decoder.h: a Llama-like decoder as C sees it, and one step of it."""

from __future__ import annotations

import ctypes

from runtime.kernels.cpu.attention import PAGE, Storage
from runtime.kernels.cpu.library import Linear, fields

SKIP_ATTENTION, SKIP_MLP = 1, 2  # of `Block.skip`

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Block(ctypes.Structure):
    """One layer: its weights (addresses; whoever fills it keeps the tensors alive) and its part of the cache."""

    _fields_ = (
        *fields(Linear, "query", "key", "value", "output", "gate", "up", "down"),
        *fields(_p, "input_norm", "mlp_norm", "query_norm", "key_norm", "keys", "values", "stored"),
        *fields(_i64, "window", "skip"),
    )


class Decoder(ctypes.Structure):
    """The whole model but the embedding."""

    _fields_ = (
        *fields(_i64, "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "rotary"),
        *fields(_i32, "cache_type", "digits"),
        *fields(_f32, "eps", "scale"),
        *fields(Storage, "storage"),
        *fields(ctypes.POINTER(Block), "blocks"),
        *fields(_p, "final_norm"),
        *fields(Linear, "head"),
    )


class Step(ctypes.Structure):
    """Some tokens of some sequences, through all layers."""

    _fields_ = (
        *fields(_i64, "rows", "outputs", "pages_stride", "first", "last"),
        *fields(_p, "x", "sequence", "position", "slot", "base", "path"),  # of each row
        *fields(_p, "slots", "pages", "cosine", "sine"),  # of all
        *fields(_p, "output", "logits", "record", "memory"),  # whose logits, and where results go
        *fields(_p, "settle", "broken"),  # pages that are stored in fewer bits from now on
        *fields(_i64, "settled"),
        *fields(ctypes.POINTER(Decoder), "decoder"),
    )


__all__ = ["PAGE", "SKIP_ATTENTION", "SKIP_MLP", "Block", "Decoder", "Step"]
