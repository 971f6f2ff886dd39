"""Expected speedup of speculative decoding by measured acceptance (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any


def tokens_of(by_position: Sequence[float]) -> float:
    """Tokens that one pass of the target yields, where each drafted one is accepted with its probability given all before it."""
    *_, total = accumulate(accumulate(by_position, mul), initial=1.0)  # `sum` rounds otherwise from Python 3.12 on
    return total


def speedup(tokens: float, length: int, draft_cost: float, row_cost: float = 0.0) -> float:
    """How many times faster than one token at a time.

    Args:
        tokens: that a pass of the target yields (`tokens_of`, or measured).
        length: tokens that are drafted for it, 0: none.
        draft_cost: of one drafted token, in units of the target's pass over one token (the paper's c). For drafts that propose all in one
            pass, that pass divided by `length`.
        row_cost: of each further token in the target's pass, in the same units. The paper's is 0, that of a target bound by memory.

    Returns:
        tokens / (length * draft_cost + 1 + length * row_cost).
    """
    return tokens / (length * draft_cost + (1 + row_cost * length))


def best_length(
    by_position: Sequence[float], draft_cost: float, row_cost: float = 0.0, one_pass: bool = False
) -> tuple[int, float]:
    """How many tokens to draft, 0 to as many positions as were measured, and the speedup of that: the largest, of equals the shorter.

    Args:
        draft_cost, row_cost: as of `speedup`; with `one_pass` the draft's is of the pass that proposes them all, which a shorter draft
            pays whole too.
    """
    options = []
    for length in range(len(by_position) + 1):
        each = draft_cost / max(1, length) if one_pass else draft_cost
        options.append((speedup(tokens_of(by_position[:length]), length, each, row_cost), -length))
    found, length = max(options)
    return -length, found


Worth = dict[str, dict[str, dict[str, float]]]


def worth(measured: Mapping[str, Any], cost: float, *, one_pass: bool = False, row_cost: float = 0.0) -> Worth:
    """{kind: {"greedy", "sampling": {"cost", "length", "speedup"}}}; what was not measured is left out.

    Args:
        measured: {kind: what `compress.distill.draft.acceptance.measure_acceptance` returns}.
        cost: bytes that are read for a drafted token, as a share of those of the target's step: its speed where memory is what binds.
        one_pass: the cost is that of a pass that proposes all tokens.
        row_cost: as of `speedup`.
    """
    result: Worth = {}
    for kind, value in measured.items():
        result[kind] = {}
        for way, run in (value["continuations"] or value["text"]).items():
            if run is not None:
                rates = [rate for rate in run["by_position"] if rate is not None]
                length, speedup = best_length(rates, cost, row_cost, one_pass)
                result[kind][way] = {"cost": cost, "length": length, "speedup": speedup}
    return result
