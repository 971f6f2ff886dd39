"""Allocation of channels to layers: those widths of a given sum whose errors add up to the least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from compress.core.knapsack import choose

MOST = 9
"""Widths at which the error of a layer is measured."""


def candidates(choices: Sequence[int], count: int, most: int = MOST) -> list[int]:
    """At most so many of the widths that may be chosen, ascending and evenly spread; the first, and all there are (`count`) among them."""
    every = sorted({*choices, count})
    places = np.unique(np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int))
    return [every[place] for place in places]


def spread(errors: Sequence[Mapping[int, float]], choices: Sequence[int], total: int) -> list[int]:
    """One of `choices` for each layer, of a sum of at most `total`: those of the least sum of errors (`compress.core.knapsack`).

    Args:
        errors: of each layer by width, for the least of the choices, the largest, and some between; between two it is on a line.
        choices: ascending, of one distance (the last may be nearer).
        total: at least as many as all layers take at the least width.
    """
    if total < len(errors) * choices[0]:
        raise ValueError(f"{len(errors)} layers of {choices[0]} are more than {total}")
    losses = [list(np.interp(choices, sorted(own), [own[point] for point in sorted(own)])) for own in errors]
    return [choices[place] for place in choose([choices] * len(errors), losses, total)]
