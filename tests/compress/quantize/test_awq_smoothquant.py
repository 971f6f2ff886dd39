"""Function-preserving scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.core.method import Problem
from compress.core.statistics import Statistics, StatisticsCollector
from compress.quantize import METHODS, resolve_scheme
from compress.weights.solver.group import solve_group


def problem(outliers: float = 20.0) -> tuple[list[torch.Tensor], torch.Tensor, Statistics]:
    """Two consumers of one input with a few channels that carry most of the signal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator)
    x[:, :4] *= outliers
    collector = StatisticsCollector(64)
    collector.add(x)
    return [torch.randn(24, 64, generator=generator), torch.randn(16, 64, generator=generator)], x, collector.finish()


def scales(method: str, weights: list[torch.Tensor], statistics: Statistics, **fields: Any) -> torch.Tensor:
    config = METHODS[method].config(**fields)
    found = METHODS[method].scales
    assert found is not None
    return found(weights, statistics, resolve_scheme(config), config)


def output_error(weight: torch.Tensor, approximation: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (weight - approximation).T).square().sum() / (x @ weight.T).square().sum())


@pytest.mark.parametrize("duo", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_awq_scales_lower_the_output_error(bits: int, duo: bool) -> None:
    weights, x, statistics = problem()
    config = METHODS["rtn"].config(bits=bits, group_size=32, scales="minmax")
    scheme = resolve_scheme(config)
    s = scales("awq", weights, statistics, bits=bits, group_size=32, grid_points=10, duo_scaling=duo)
    assert s.shape == (64,)
    assert (s > 0).all()
    plain = solve_group(Problem(weights, None, None, config, scheme, torch.float32))
    scaled = solve_group(Problem([w * s for w in weights], None, None, config, scheme, torch.float32))
    for weight, before, after in zip(weights, plain, scaled, strict=True):
        unscaled = output_error(weight, before.weight.dequantize(), x)
        assert output_error(weight, after.weight.dequantize() / s, x) < 0.8 * unscaled


def test_the_error_after_scaling_is_that_of_the_scaled_statistics() -> None:
    weights, x, statistics = problem()
    config = METHODS["awq"].config(bits=4, group_size=32)
    scheme = resolve_scheme(config)
    method = METHODS["awq"]
    assert method.scales is not None
    s = method.scales(weights, statistics, scheme, config)
    results = solve_group(Problem([w * s for w in weights], statistics.scaled(s), None, config, scheme, torch.float32))
    for weight, result in zip(weights, results, strict=True):
        assert result.error == pytest.approx(output_error(weight, result.weight.dequantize() / s, x), rel=1e-3)


def test_clipping_lowers_the_output_error_and_gptq_lowers_it_further() -> None:
    weights, _, statistics = problem()
    errors = []
    for fields in ({"scales": "minmax"}, {"scales": "hessian"}, {"scales": "hessian", "solver": "gptq"}):
        config = METHODS["awq"].config(bits=3, group_size=32, **fields)
        results = solve_group(Problem(weights, statistics, None, config, resolve_scheme(config), torch.float32))
        errors.append(sum(r.error for r in results))
    assert errors[0] > errors[1] >= errors[2]


def test_smoothquant_balances_inputs_and_weights() -> None:
    weights, x, statistics = problem()
    s = scales("smoothquant", weights, statistics, alpha=0.5)
    spread = (x / s).abs().amax(0)
    assert spread.max() / spread.min() < 0.5 * x.abs().amax(0).max() / x.abs().amax(0).min()
    inputs, columns = (x / s).abs().amax(0), torch.cat(weights).abs().amax(0) * s
    torch.testing.assert_close(inputs, columns)
    ones = scales("smoothquant", weights, statistics, alpha=0.0) * torch.cat(weights).abs().amax(0)
    torch.testing.assert_close(ones, torch.ones(64))


def test_channels_without_input_keep_finite_scales() -> None:
    weights, _, _ = problem()
    collector = StatisticsCollector(64)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    x[:, 10:20] = 0
    collector.add(x)
    statistics = collector.finish()
    for s in (
        scales("smoothquant", weights, statistics),
        scales("awq", weights, statistics, group_size=32, grid_points=5),
    ):
        assert torch.isfinite(s).all()
        assert (s > 0).all()
        assert torch.isfinite(1 / s).all()
