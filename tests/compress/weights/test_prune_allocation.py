"""Sparsity budgets over layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compress.core.statistics import StatisticsCollector
from compress.weights.allocate import error_score, outlier_score, spread

layers = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 10**6)), min_size=1, max_size=20)


@settings(deadline=None, max_examples=50)
@given(layers, st.floats(0.01, 0.99))
@example([(0, 1), (0, 3023), (1, 153)], 0.01171875)
def test_the_weighted_mean_is_the_target_and_order_follows_the_scores(
    pairs: list[tuple[int, int]], target: float
) -> None:
    scores, sizes = [p[0] for p in pairs], [p[1] for p in pairs]
    shares = spread(scores, sizes, target)
    mean = sum(s * n for s, n in zip(shares, sizes, strict=True)) / sum(sizes)
    assert mean == pytest.approx(target, abs=1e-9)
    assert all(0 <= s < 1 and abs(s - target) <= 0.08 + 1e-9 for s in shares)
    ranked = sorted(zip(scores, shares, strict=True))
    assert all(a[1] >= b[1] - 1e-12 for a, b in pairwise(ranked))


def test_equal_scores_give_the_target() -> None:
    assert spread([2.0, 2.0], [10, 1000], 0.5) == [0.5, 0.5]


def test_scores_see_outliers_and_energy() -> None:
    generator = torch.Generator().manual_seed(0)
    collector = StatisticsCollector(64)
    collector.add(torch.randn(256, 64, generator=generator))
    statistics = collector.finish()
    plain = torch.randn(32, 64, generator=generator)
    spiky = plain.clone()
    spiky[:, 3] *= 50
    assert outlier_score([spiky], [statistics]) > outlier_score([plain], [statistics])
    assert 0 < error_score(plain, statistics, 0.5) < error_score(plain, statistics, 0.7) < 1
    assert error_score(spiky, statistics, 0.5) < error_score(plain, statistics, 0.5)
    assert error_score(plain, statistics, 0.0) == 0
