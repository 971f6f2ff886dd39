"""What a step of several texts is worth."""

from __future__ import annotations

import random

import pytest

from runtime.drafting.lengths.base import Costs
from runtime.drafting.lengths.goodput import Gains


@pytest.mark.parametrize(("fixed", "row", "worth"), [(0.001, 0.0016, 8 * 0.0016 / 0.0138), (0.012, 0.0001, 1.0)])
def test_what_the_slowest_gains_counts_whole_and_the_rest_as_its_rows(fixed: float, row: float, worth: float) -> None:
    costs, numbers = Costs(), random.Random(2)
    for rows in range(8, 12):  # fewer were never measured
        costs.step.add(rows, fixed + row * rows)
    for _ in range(20):
        gains, more = Gains(8, costs, 8), [0.0] * 8
        for _ in range(60):
            text, tokens = numbers.randrange(8), numbers.choice((0.0, 0.25, 0.5, 1.0))
            gains.add(text, tokens)
            more[text] += tokens
            least = min(more)
            assert gains.worth == pytest.approx(8 + 8 * least + worth * (sum(more) - 8 * least))


def test_a_text_by_itself_gains_all_it_gets() -> None:
    costs = Costs()
    costs.step.add(1, 0.01)
    gains = Gains(1, costs, 1)
    gains.add(0, 0.5)
    gains.add(0, 0.0)
    gains.add(0, 0.25)
    assert gains.worth == 1.75
