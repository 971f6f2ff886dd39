"""Multiple-choice knapsack: one option for each item, of the least sum of losses within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

#: Most sums that are told apart; where costs have no such common step, they are rounded to one.
SUMS = 200_000


def choose(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int, near: int = 0) -> list[int]:
    """The number of an option for each item, by dynamic programming over the sums of costs.

    The least sum of losses there is, where the costs' common step goes into the room above the cheapest options at most `SUMS` times; else
    near it. Of equal losses the cheaper one is taken.

    Args:
        costs: of each item's options.
        losses: likewise.
        budget: most that the options may cost together.
        near: they shall cost as much at least, if they can.

    Raises:
        ValueError: the cheapest options cost more.
    """
    cheapest = [min(own) for own in costs]
    room = budget - sum(cheapest)
    if room < 0:
        raise ValueError(f"the cheapest options cost {sum(cheapest)}, which is more than {budget}")
    above = [[cost - least for cost in own] for own, least in zip(costs, cheapest, strict=True)]
    room = min(room, sum(map(max, above)))
    step = math.gcd(*(cost for own in above for cost in own)) or 1
    step *= -(-room // (SUMS * step)) or 1
    sums = room // step
    best, chosen = np.full(sums + 1, np.inf), []
    best[0] = 0.0
    for own, lost in zip(above, losses, strict=True):
        options = np.full((len(own), sums + 1), np.inf)
        for place, cost in enumerate(own):
            steps = round(cost / step)
            if steps <= sums:
                options[place, steps:] = best[: sums + 1 - steps] + lost[place]
        chosen.append(options.argmin(0).astype(np.uint16))
        best = options.min(0)
    first = min(sums, max(0, -(-(near - sum(cheapest)) // step)))
    near_ones = first + np.flatnonzero(np.isfinite(best[first:]))
    # Costs that were rounded may add up to more than the room: then those of the next larger loss.
    for left in (*near_ones[np.argsort(best[near_ones], kind="stable")], *np.argsort(best, kind="stable")):
        found = _followed(above, chosen, step, int(left))
        if sum(own[place] for own, place in zip(above, found, strict=True)) <= room:
            return found
    raise AssertionError("the cheapest options are within the budget")


def _followed(above: Sequence[Sequence[int]], chosen: Sequence[np.ndarray], step: int, left: int) -> list[int]:
    """The options that lead to a sum."""
    found = list[int]()
    for own, picks in zip(reversed(above), reversed(chosen), strict=True):
        place = int(picks[left])
        found.append(place)
        left -= round(own[place] / step)
    return found[::-1]
