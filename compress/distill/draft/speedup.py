"""What acceptance is worth: tokens of a step and expected speedup of speculative decoding.

Fast Inference from Transformers via Speculative Decoding (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.errors import RequestError

#: What the target takes to read so many tokens in one pass, in units of what it takes for one.
VerifyCost = Callable[[int], float] | Mapping[int, float] | float


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens that one pass of the target yields with `length` drafted ones of which each is accepted, if those before it are, with the same
    probability: (1 - a^(length + 1)) / (1 - a)."""
    _check(acceptance, length)
    return sum(acceptance**count for count in range(length + 1))


def tokens_of(by_position: Sequence[float]) -> float:
    """As `expected_tokens` where each position has its own acceptance, given all before it."""
    total, reach = 1.0, 1.0
    for acceptance in by_position:
        _check(acceptance, 0)
        reach *= acceptance
        total += reach
    return total


def speedup(tokens: float, length: int, draft_cost: float, verify_cost: VerifyCost = 1.0) -> float:
    """How many times faster than one token at a time.

    Args:
        tokens: that a pass of the target yields (`expected_tokens`, `tokens_of`, or measured).
        length: tokens that are drafted for it, 0: none.
        draft_cost: of one drafted token, in units of the target's pass over one token (the paper's c). For drafts that propose all in one
            pass, that pass divided by `length`.
        verify_cost: of the target's pass over length + 1 tokens, in the same units: a number, {tokens: cost} (linear between entries), or
            a function of the tokens. The paper's is 1, that of a target bound by memory.

    Returns:
        tokens / (length * draft_cost + verify_cost).
    """
    if draft_cost < 0:
        raise RequestError(f"the cost of a drafted token must be at least 0, not {draft_cost}")
    return tokens / (length * draft_cost + _cost(verify_cost, length + 1))


def best_length(
    by_position: Sequence[float], draft_cost: float, verify_cost: VerifyCost = 1.0, one_pass: bool = False
) -> tuple[int, float]:
    """How many tokens to draft, 0 to as many positions as were measured, and the speedup of that: the largest, of equals the shorter.

    Args:
        draft_cost: as of `speedup`, of one drafted token; with `one_pass` of the pass that proposes them all, which a shorter draft pays
            whole too.
    """
    options = []
    for length in range(len(by_position) + 1):
        each = draft_cost / max(1, length) if one_pass else draft_cost
        promise = speedup(tokens_of(by_position[:length]), length, each, verify_cost if length else 1.0)
        options.append((promise, -length))
    found, length = max(options)
    return -length, found


def _cost(curve: VerifyCost, tokens: int) -> float:
    if callable(curve):
        cost = float(curve(tokens))
    elif isinstance(curve, Mapping):
        cost = _between(curve, tokens)
    else:
        cost = float(curve)
    if not cost > 0:
        raise RequestError(f"the cost of verifying {tokens} tokens must be above 0, not {cost}")
    return cost


def _between(curve: Mapping[int, float], tokens: int) -> float:
    """Linear between the entries on both sides; beyond the last, along the last two; the entry itself where there is only one."""
    known = sorted(curve)
    if not known:
        raise RequestError("the cost of verifying has no entries")
    if tokens in curve or len(known) == 1:
        return float(curve.get(tokens, curve[known[0]]))
    high = next((index for index, count in enumerate(known) if count > tokens), len(known) - 1)
    low, high = (high - 1, high) if high else (0, 1)
    a, b = known[low], known[high]
    return float(curve[a] + (curve[b] - curve[a]) * (tokens - a) / (b - a))


def _check(acceptance: float, length: int) -> None:
    if not 0 <= acceptance <= 1:
        raise RequestError(f"an acceptance rate must be 0 to 1, not {acceptance}")
    if length < 0:
        raise RequestError(f"tokens to draft must be at least 0, not {length}")


# What a measured draft is worth: for each kind of text the draft length that pays best and the speedup that it promises.

Worth = dict[str, dict[str, dict[str, float]]]


def worth(measured: Mapping[str, Any], cost: float, *, one_pass: bool = False, verify_cost: VerifyCost = 1.0) -> Worth:
    """{kind: {"greedy", "sampling": {"cost", "length", "speedup"}}}; what was not measured is left out.

    Args:
        measured: {kind: what `compress.distill.draft.acceptance.measure_acceptance` returns}.
        cost: bytes that are read for a drafted token, as a share of those of the target's step: its speed where memory is what binds.
        one_pass: the cost is that of a pass that proposes all tokens.
        verify_cost: of the target's step over several tokens (`compress.distill.draft.speedup`).
    """
    result: Worth = {}
    for kind, value in measured.items():
        result[kind] = {}
        for way, run in (value["continuations"] or value["text"]).items():
            if run is not None:
                rates = [rate for rate in run["by_position"] if rate is not None]
                length, speedup = best_length(rates, cost, verify_cost, one_pass)
                result[kind][way] = {"cost": cost, "length": length, "speedup": speedup}
    return result
