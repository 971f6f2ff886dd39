"""What a measured draft is worth: for each kind of text the draft length that pays best and the speedup that it promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.distill.speedup import VerifyCost, best_length

Worth = dict[str, dict[str, dict[str, float]]]


def worth(measured: Mapping[str, Any], cost: float, *, one_pass: bool = False, verify_cost: VerifyCost = 1.0) -> Worth:
    """{kind: {"greedy", "sampling": {"cost", "length", "speedup"}}}; what was not measured is left out.

    Args:
        measured: {kind: what `compress.distill.acceptance.measure_acceptance` returns}.
        cost: bytes that are read for a drafted token, as a share of those of the target's step: its speed where memory is what binds.
        one_pass: the cost is that of a pass that proposes all tokens.
        verify_cost: of the target's step over several tokens (`compress.distill.speedup`).
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
