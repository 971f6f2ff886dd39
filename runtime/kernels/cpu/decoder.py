"""The types of program.h: the operations of a decoder as C sees them, and one step of it."""

from __future__ import annotations

import ctypes
from typing import Any

from runtime.kernels.cpu.attention import PAGE, Ragged, Storage
from runtime.kernels.cpu.experts import Experts, Router
from runtime.kernels.cpu.library import Linear, fields

SKIP_ATTENTION, SKIP_MLP = 1, 2  # of `Block.skip` and `Op.half`
STREAM, LOGITS, MOST_BUFFERS = 0, 1, 32  # buffers; the last of a decoder has the rows whose logits are wanted
OPS = ("norm", "linear", "heads", "attend", "gate", "add", "cap", "mixture", "weigh")
"""Kinds of operations, by their numbers."""

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Span(ctypes.Structure):
    """Where heads lie in the rows of a buffer."""

    _fields_ = (*fields(_i32, "buffer", "group"), *fields(_i64, "at", "step", "group_step"))


class NormOp(ctypes.Structure):
    """Of a kind of `Op`, as the following."""

    _fields_ = (*fields(_p, "weight", "bias"), ("eps", _f32), ("layer", _i32))


class HeadsOp(ctypes.Structure):
    """Norms of heads, rotation, keys and values into the cache."""

    _fields_ = (
        *fields(Span, "query", "key", "value", "rest"),
        *fields(_p, "query_norm", "key_norm"),
        *fields(_i64, "query_apart", "key_apart"),
        ("eps", _f32),
        *fields(_i32, "layer", "rotary", "rotation", "pairs", "rotary_at"),
    )


class AttendOp(ctypes.Structure):
    """Attention over the cache."""

    _fields_ = (("window", _i64), ("sinks", _p), *fields(_f32, "scale", "softcap"))


class GateOp(ctypes.Structure):
    """An activation, maybe times another buffer."""

    _fields_ = (*fields(_i32, "activation", "other"), ("other_at", _i64))


class MixtureOp(ctypes.Structure):
    """Routed experts."""

    _fields_ = (("router", ctypes.POINTER(Router)), ("experts", ctypes.POINTER(Experts)))


class _Kinds(ctypes.Union):
    _fields_ = (
        ("linear", Linear),
        ("norm", NormOp),
        ("heads", HeadsOp),
        ("attend", AttendOp),
        ("gate", GateOp),
        ("mixture", MixtureOp),
        ("cap", _f32),
    )


class Op(ctypes.Structure):
    """An operation (whoever fills it keeps the tensors alive that it points to)."""

    _anonymous_ = ("of",)
    _fields_ = (
        *fields(_i32, "kind", "half", "from_", "to", "add"),
        ("scale", _f32),
        *fields(_i64, "from_at", "to_at", "count"),
        ("of", _Kinds),
    )


class Block(ctypes.Structure):
    """One layer: its operations, and its part of the cache."""

    _fields_ = (
        ("ops", ctypes.POINTER(Op)),
        ("count", _i64),
        *fields(_p, "keys", "values", "stored", "bounds"),
        ("skip", _i64),
    )


class Decoder(ctypes.Structure):
    """The whole model but the embedding. `operations`: the arrays that its blocks point to."""

    operations: Any = ()
    _fields_ = (
        *fields(_i64, "layers", "hidden", "heads", "kv_heads", "head_dim", "value_dim", "buffers", "tail_count"),
        ("cache_type", _i32),
        ("storage", Storage),
        ("widths", ctypes.POINTER(_i64)),
        ("blocks", ctypes.POINTER(Block)),
        ("tail", ctypes.POINTER(Op)),
    )


class Step(ctypes.Structure):
    """Some tokens of some sequences, through all layers."""

    _fields_ = (
        *fields(_i64, "rows", "outputs", "pages_stride", "first", "last", "narrow"),
        *fields(_p, "x", "sequence", "rotary", "position", "slot", "base", "path"),  # of each row
        *fields(_p, "slots", "pages", "tables"),  # of all
        *fields(_p, "output", "logits", "record", "memory"),  # whose logits, and where results go
        *fields(_p, "stored", "broken"),  # pages that are stored in fewer bits from now on
        ("stored_count", _i64),
        *fields(_p, "observed", "queries"),  # rows whose queries are wanted, and where they go
        ("observed_count", _i64),
        ("ragged", _p),  # of each sequence
        *fields(_p, "budget", "chosen"),  # what rows read
        ("newest", _i64),
        *fields(ctypes.POINTER(Decoder), "decoder"),
    )


class Copy(ctypes.Structure):
    """Positions of one sequence, from pages into pages, in all layers."""

    _fields_ = (
        ("decoder", ctypes.POINTER(Decoder)),
        *fields(_p, "pages", "into", "old", "new"),
        *fields(_i64, "count", "apart", "before", "after"),
        *fields(_p, "counts", "source", "target", "broken"),
    )


class Received(ctypes.Structure):
    """What tokens of one sequence get of the attention of some queries, in all layers."""

    _fields_ = (
        ("decoder", ctypes.POINTER(Decoder)),
        *fields(_p, "pages", "ragged"),
        *fields(_i64, "rows", "slots"),
        *fields(_p, "hidden", "position", "query", "sums", "memory"),
    )


class Tokens(ctypes.Structure):
    """Keys and values of tokens of one sequence in a layer."""

    _fields_ = (
        ("decoder", ctypes.POINTER(Decoder)),
        *fields(_p, "pages", "ragged"),
        *fields(_i64, "layer", "count", "before"),
        *fields(_p, "source", "keys", "values"),
    )


__all__ = [
    "LOGITS",
    "MOST_BUFFERS",
    "OPS",
    "PAGE",
    "SKIP_ATTENTION",
    "SKIP_MLP",
    "STREAM",
    "Block",
    "Copy",
    "Decoder",
    "Op",
    "Ragged",
    "Received",
    "Step",
    "Tokens",
]
