"""Allocation of channels to layers: those widths of a given sum whose errors add up to the least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

MOST = 9
"""Widths at which the error of a layer is measured."""


def candidates(choices: Sequence[int], count: int, most: int = MOST) -> list[int]:
    """At most so many of the widths that may be chosen, ascending and evenly spread; the first, and all there are (`count`) among them."""
    every = sorted({*choices, count})
    places = np.unique(np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int))
    return [every[place] for place in places]


def spread(errors: Sequence[Mapping[int, float]], choices: Sequence[int], total: int) -> list[int]:
    """One of `choices` for each layer, of a sum of at most `total`: exact, by dynamic programming over the sums.

    Args:
        errors: of each layer by width, for the least of the choices, the largest, and some between; between two it is on a line.
        choices: ascending, of one distance (the last may be nearer).
        total: at least as many as all layers take at the least width.
    """
    widths = np.asarray(choices)
    step = int(np.gcd.reduce(np.concatenate([np.diff(widths), widths[:1]]))) if len(widths) > 1 else int(widths[0])
    cost = (widths - widths[0]) // step
    room = (total - len(errors) * int(widths[0])) // step
    if room < 0:
        raise ValueError(f"{len(errors)} layers of {widths[0]} are more than {total}")
    best, chosen = np.zeros(room + 1), []
    for own in errors:
        points = sorted(own)
        lost = np.interp(widths, points, [own[point] for point in points])
        options = np.full((len(widths), room + 1), np.inf)
        for place, more in enumerate(cost):
            if more <= room:
                options[place, more:] = best[: room + 1 - more] + lost[place]
        chosen.append(options.argmin(0))
        best = options.min(0)
    left, found = int(best.argmin()), list[int]()
    for picks in reversed(chosen):
        place = int(picks[left])
        found.append(int(widths[place]))
        left -= int(cost[place])
    return found[::-1]
