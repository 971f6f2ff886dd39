"""Mixtures of experts on a CPU through this folder's C library: structures of experts.h, and one call for all experts of a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import threads_for
from runtime.kernels.cpu.library import KINDS, Linear, Rounding, bytes_at, fields

#: Gates: `silu(up)`, `silu(gate) * up`, and gpt-oss's `(up + 1) * gate * sigmoid(alpha * gate)` of values held within `limit`.
GATES = {"none": 0, "silu": 1, "clamped": 2}
#: What weighs experts: a softmax over all, a softmax over the chosen ones, or a sigmoid of each.
SCORES = {"softmax": 0, "chosen": 1, "sigmoid": 2}

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Expert(ctypes.Structure):
    """The linear layers of one; `gate` is unused where the gate is "none"."""

    _fields_ = (*fields(Linear, "gate", "up", "down"),)


class Reading(ctypes.Structure):
    """`Reading` of experts.h: what experts' layers read, digits for integer layers and floats for dense ones."""

    _fields_ = (("groups", _i64), *fields(_i32, "group", "digits"), ("rounding", Rounding), ("dense", _i64))


class Experts(ctypes.Structure):
    """All of a layer. `activation` is one of GATES; `own_scales`: each has static scales of its own for what it reads."""

    _fields_ = (
        *fields(ctypes.POINTER(Expert), "expert"),
        *fields(_i64, "count", "hidden", "inner"),
        *fields(Reading, "first", "second"),
        *fields(_i32, "own_scales", "activation"),
        *fields(_f32, "alpha", "limit"),
    )


class Router(ctypes.Structure):
    """How experts are chosen and weighed, see experts.h; `score` is one of SCORES.

    The `chosen` experts of the highest scores (plus `correction`) of the `best` of `groups` groups; weights divided by their sum plus
    `epsilon` where `normalize`, then multiplied by `scale`. Of equal scores the expert of the lower number comes first, where torch.topk
    promises nothing; NaN is the highest, as there.
    """

    _fields_ = (
        *fields(Linear, "logits"),
        *fields(_i32, "score", "chosen", "groups", "best", "normalize"),
        *fields(_f32, "epsilon", "scale"),
        *fields(_p, "correction"),
    )


def experts_of(
    linear: Sequence[tuple[Linear | None, Linear, Linear]],
    gate: str,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> Experts | str:
    """All experts of a layer, or the reason why C does not compute them together.

    Args:
        linear: of each expert, its gate, up and down projection (no gate where `gate` is "none"); who calls keeps their tensors alive.
        gate: of GATES; `alpha` and `limit` are those of "clamped".
    """
    first = linear[0][1]
    for own_gate, up, own in linear:
        reading = [up] if own_gate is None else [own_gate, up]
        if (own_gate is None) != (gate == "none"):
            return "only some of its experts have a gate"
        if any((x.rows, x.columns) != (first.rows, first.columns) for x in reading):
            return "its experts are of different widths"
        if (own.rows, own.columns) != (first.columns, first.rows):
            return "its experts do not give back what they read"
    readings = []
    if any(gate is not None and bytes(gate.rounding) != bytes(up.rounding) for gate, up, _ in linear):
        return "an expert's gate and up projection quantize their input with different scales"
    for layers in ([x for each in linear for x in each[:2] if x is not None], [each[2] for each in linear]):
        coded = [x for x in layers if x.kind != KINDS["dense"]]
        if len({(x.digits, rounding_kind(x)) for x in coded}) > 1 or len({rounding_kind(x) for x in layers}) > 1:
            return "its experts quantize their inputs in different ways"
        if len({(x.groups, x.group) for x in coded}) > 1:
            return "its experts' weights have groups of different sizes"
        one = coded[0] if coded else layers[0]
        readings.append(Reading(one.groups, one.group, one.digits, one.rounding, len(coded) < len(layers)))
    own_scales = len({bytes(up.rounding) for _, up, _ in linear}) > 1
    rows = (Expert * len(linear))(*(Expert(up if gate is None else gate, up, own) for gate, up, own in linear))
    return Experts(rows, len(linear), first.columns, first.rows, *readings, own_scales, GATES[gate], alpha, limit)


def rounding_kind(layer: Linear) -> tuple[float, ...]:
    """What layers computed together must share of their rounding: all but static scales and zero points."""
    own = layer.rounding
    return own.kind, own.bits, own.scales, own.span, own.tail, own.threshold, own.scale != 0


def run(experts: Experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the chosen experts make of `x` `[rows, hidden]` together, float32 sums in the order of their numbers, in its dtype.

    Args:
        experts: of `experts_of`.
        x: float32, bfloat16 or float16.
        index: `[rows, k]`, numbers of experts; those that are none are left out.
        weights: `[rows, k]`.
    """
    native, (rows, chosen) = library.load(), index.shape
    assert native is not None
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    if not y.numel():
        return y
    index, weights = index.to(torch.int64).contiguous(), weights.float().contiguous()
    memory = bytes_at(native.experts_memory(ctypes.byref(experts), rows, chosen) + 64)
    kind, threads = library.TYPES[x.dtype], threads_for(rows * chosen * 3 * experts.hidden * experts.inner)
    native.experts_run(
        ctypes.byref(experts), x.data_ptr(), kind, rows, chosen, index.data_ptr(), weights.data_ptr(), y.data_ptr(), kind,
        -(-memory // 64) * 64, threads,
    )  # fmt: skip
    return y


def route(router: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 `[rows, k]` and their weights float32 `[rows, k]`, for `x` float32 `[rows, hidden]`."""
    native, count = library.load(), router.logits.rows
    assert native is not None
    x, rows = x.float().contiguous(), x.shape[0]
    index, weights = torch.empty(rows, router.chosen, dtype=torch.int64), torch.empty(rows, router.chosen)
    memory = torch.empty(rows, 3 * count)
    native.router_run(
        ctypes.byref(router), x.data_ptr(), rows, index.data_ptr(), weights.data_ptr(), memory.data_ptr(),
        threads_for(rows * count * router.logits.columns),
    )  # fmt: skip
    return index, weights
