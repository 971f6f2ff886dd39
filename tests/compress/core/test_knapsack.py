"""Multiple-choice knapsack against all combinations."""

from __future__ import annotations

import itertools
import random

import pytest

from compress.core import knapsack
from compress.core.knapsack import choose


def drawn(seed: int) -> tuple[list[list[int]], list[list[float]], int]:
    chance = random.Random(seed)
    step = chance.choice([1, 7, 1000])
    items = [chance.randint(1, 4) for _ in range(chance.randint(1, 5))]
    costs = [[step * chance.randint(0, 30) for _ in range(count)] for count in items]
    losses = [[chance.random() for _ in range(count)] for count in items]
    return costs, losses, chance.randint(sum(map(min, costs)), sum(map(max, costs)))


def total(costs: list[list[int]] | list[list[float]], picks: tuple[int, ...] | list[int]) -> float:
    return sum(own[pick] for own, pick in zip(costs, picks, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_the_loss_is_the_least_there_is(seed: int) -> None:
    costs, losses, budget = drawn(seed)
    within = [p for p in itertools.product(*map(range, map(len, costs))) if total(costs, p) <= budget]
    found = choose(costs, losses, budget)
    assert total(costs, found) <= budget
    assert total(losses, found) == pytest.approx(min(total(losses, p) for p in within))
    near = random.Random(seed).randint(0, budget)
    high = [p for p in within if total(costs, p) >= near]
    found = choose(costs, losses, budget, near)
    assert total(costs, found) <= budget
    assert total(losses, found) == pytest.approx(min(total(losses, p) for p in high or within))
    assert total(costs, found) >= near or not high


@pytest.mark.parametrize("seed", range(60))
def test_costs_without_a_common_step_keep_to_the_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "SUMS", 40)
    chance = random.Random(seed)
    costs = [[chance.randint(1, 10**6) for _ in range(3)] for _ in range(6)]
    losses = [[1 / cost for cost in own] for own in costs]
    budget = chance.randint(sum(map(min, costs)), sum(map(max, costs)))
    found = choose(costs, losses, budget)
    best = min(total(losses, p) for p in itertools.product(range(3), repeat=6) if total(costs, p) <= budget)
    assert total(costs, found) <= budget
    cheapest = [own.index(min(own)) for own in costs]
    assert best <= total(losses, found) + 1e-15 <= best + 0.6 * (total(losses, cheapest) - best) + 2e-15


def test_less_than_the_cheapest_is_an_error() -> None:
    with pytest.raises(ValueError, match="cost 90, which is more than 89"):
        choose([[30, 40]] * 3, [[1.0, 0.0]] * 3, 89)


def test_of_equal_losses_the_cheaper_one_is_taken() -> None:
    assert choose([[5, 3], [1, 9]], [[1.0, 1.0], [2.0, 2.0]], 100) == [1, 0]
