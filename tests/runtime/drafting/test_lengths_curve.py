"""What steps take, learned while the machine does other things too."""

from __future__ import annotations

import random

import pytest

from runtime.drafting.lengths.base import Curve


def test_nothing_is_known_at_first_and_then_the_slope() -> None:
    curve = Curve(0.5)
    assert curve.last == 0
    assert curve(3) == 0.0
    curve.add(2, 3.0)
    assert curve.last > 0
    assert curve(2) == 3.0
    assert curve(1) == pytest.approx(2.0)
    assert curve(3) == pytest.approx(4.0)


def test_between_and_beyond_measured_numbers() -> None:
    curve = Curve(0.3)
    for _ in range(5):
        for n in (1, 5):
            curve.add(n, 10.0 + n)
    assert curve(1) == pytest.approx(11.0)
    assert curve(3) == pytest.approx(13.0)
    assert curve(7) == pytest.approx(17.0)


def test_a_few_disturbed_samples_change_nothing() -> None:
    curve = Curve(0.3)
    for place in range(20):
        for n in (1, 2, 3):
            curve.add(n, 100.0 if place % 4 == n else 10.0 + n)
    assert [round(curve(n), 1) for n in (1, 2, 3)] == [11.0, 12.0, 13.0]


def test_a_number_that_is_seldom_seen_follows_the_speed_of_the_others() -> None:
    curve, draw = Curve(0.3), random.Random(0)
    for _ in range(9):
        for n in (1, 2, 4):
            curve.add(n, 10.0 + n)
    for _ in range(30):  # from now on all takes half as long again, and 1 is not seen any more
        n = draw.choice((2, 4))
        curve.add(n, 1.5 * (10.0 + n))
    assert curve(2) == pytest.approx(18.0)
    assert curve(4) == pytest.approx(21.0)
    assert curve(1) == pytest.approx(16.5)
    assert curve(3) == pytest.approx(19.5)


def test_more_never_takes_less() -> None:
    curve = Curve(0.3)
    for n, seconds in ((1, 10.0), (2, 30.0), (3, 12.0), (4, 13.0)):
        for _ in range(5):
            curve.add(n, seconds)
    values = [curve(n) for n in range(1, 7)]
    assert values == sorted(values)
    assert values[1] == pytest.approx(12.0)
