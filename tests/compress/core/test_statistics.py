"""What calibration collects."""

from __future__ import annotations

import pytest
import torch

from compress.core.statistics import BLOCK, StatisticsCollector


@pytest.mark.parametrize("columns", [16, BLOCK, 2 * BLOCK + 76])
def test_batches_add_up_to_the_means(columns: int) -> None:
    x = torch.randn(3, 40, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    collector = StatisticsCollector(columns)
    for batch in x:
        collector.add(batch)
    statistics = collector.finish()
    flat = x.double().reshape(-1, columns)
    assert statistics.tokens == 120
    assert statistics.finite
    assert statistics.hessian is not None
    torch.testing.assert_close(statistics.hessian.double(), flat.T @ flat / 120, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.abs_mean.double(), flat.abs().mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.square_mean, statistics.hessian.diagonal())
    assert torch.equal(statistics.minimum.double(), flat.amin(0))
    assert torch.equal(statistics.maximum.double(), flat.amax(0))


def test_padding_is_left_out_and_bad_numbers_are_seen() -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    x[1, 3:] = torch.nan
    collector = StatisticsCollector(8, hessian=False)
    collector.add(x, mask)
    statistics = collector.finish()
    assert statistics.tokens == 8
    assert statistics.finite
    assert statistics.hessian is None
    broken = StatisticsCollector(8)
    broken.add(torch.full((1, 8), torch.inf))
    assert not broken.finish().finite


def test_no_tokens_give_zeros() -> None:
    collector = StatisticsCollector(4)
    collector.add(torch.empty(0, 4))
    statistics = collector.finish()
    assert statistics.tokens == 0
    assert statistics.minimum.tolist() == [0, 0, 0, 0]


def test_scaled_is_what_a_collector_of_scaled_inputs_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    x, s = torch.randn(64, 8, generator=generator), torch.rand(8, generator=generator) + 0.5
    plain, divided = StatisticsCollector(8), StatisticsCollector(8)
    plain.add(x)
    divided.add(x / s)
    a, b = plain.finish().scaled(s), divided.finish()
    for name in ("hessian", "abs_mean", "minimum", "maximum", "square_mean"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))
