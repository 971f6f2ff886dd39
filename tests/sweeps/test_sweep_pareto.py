"""The Pareto front against its definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compress.sweeps import pareto_front

NUMBERS = st.one_of(st.integers(-3, 3).map(float), st.floats(), st.none())


def dominates(one, other, directions):
    pairs = [(a, b) if d == "min" else (-a, -b) for a, b, d in zip(one, other, directions, strict=True)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def by_definition(points, directions):
    def counts(point):
        return all(value is not None and math.isfinite(value) for value in point)

    good = [index for index, point in enumerate(points) if counts(point)]
    return [i for i in good if not any(dominates(points[j], points[i], directions) for j in good)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_it_is_what_the_definition_says(data):
    directions = data.draw(st.lists(st.sampled_from(["min", "max"]), min_size=1, max_size=4))
    row = st.lists(NUMBERS, min_size=len(directions), max_size=len(directions))
    points = data.draw(st.lists(row, max_size=25))
    assert pareto_front(points, directions) == by_definition(points, directions)


def test_equal_points_are_there_together():
    assert pareto_front([(1, 2), (1, 2), (2, 1), (2, 2)], ["min", "min"]) == [0, 1, 2]
    assert pareto_front([(1, 2), (2, 1), (2, 1), (2, 2)], ["max", "min"]) == [1, 2]


def test_what_was_not_measured_is_on_no_front():
    assert pareto_front([(math.nan, 0), (None, 0), (-math.inf, 0), (5, 5)], ["min", "min"]) == [3]
    assert pareto_front([(None, None)], ["min", "min"]) == []
    assert pareto_front([], ["min"]) == []


def test_wrong_calls():
    with pytest.raises(ValueError, match="least"):
        pareto_front([(1,)], ["least"])
    with pytest.raises(ValueError, match="point 1"):
        pareto_front([(1, 2), (1,)], ["min", "min"])
