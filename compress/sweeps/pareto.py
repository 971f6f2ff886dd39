"""Pareto front of results."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[Sequence[float | None]], directions: Sequence[str]) -> list[int]:
    """The points that no other dominates: at least as good in every objective, and better in one.

    Args:
        points: a row a point, a column an objective. A point with None, NaN or an infinity is on no front and dominates nothing.
        directions: for every objective `min` or `max`, what is better.

    Returns:
        Their indices, ascending. Of equal points, which do not dominate each other, all are there or none.

    Raises:
        ValueError: rows of another length than `directions`, or another direction.
    """
    if any(direction not in ("min", "max") for direction in directions):
        raise ValueError(f"directions are min or max, not {list(directions)}")
    costs: list[tuple[tuple[float, ...], int]] = []
    for index, point in enumerate(points):
        if len(point) != len(directions):
            raise ValueError(f"point {index} has {len(point)} values for {len(directions)} objectives")
        values = [value for value in point if value is not None and math.isfinite(value)]
        if len(values) == len(directions):
            costs.append((tuple(-v if d == "max" else v for v, d in zip(values, directions, strict=True)), index))
    # In this order a point can only be dominated by one before it, and what dominates that one dominates it too: it is enough to
    # look at the front so far.
    costs.sort()
    front: list[tuple[tuple[float, ...], int]] = []
    for cost, index in costs:
        if not any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in front):
            front.append((cost, index))
    return sorted(index for _, index in front)
