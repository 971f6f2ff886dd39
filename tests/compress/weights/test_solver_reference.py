"""The column loop against small, independent implementations of GPTQ and SparseGPT, and against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

from compress.core.method import Problem
from compress.core.statistics import Statistics, StatisticsCollector
from compress.prune import METHODS as PRUNE
from compress.quantize import METHODS as QUANTIZE
from compress.quantize import resolve_scheme
from compress.quantize.grid import make_grid
from compress.weights.solver.group import solve_group


def problem(out: int, columns: int, tokens: int = 512, seed: int = 0) -> tuple[torch.Tensor, Statistics]:
    """A random weight and correlated inputs with a few strong channels."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ (mix + 0.3 * torch.eye(columns))
    x *= torch.rand(columns, generator=generator) * 2 + 0.1
    collector = StatisticsCollector(columns)
    collector.add(x)
    return torch.randn(out, columns, generator=generator), collector.finish()


def damped(statistics: Statistics, damping: float = 0.01) -> torch.Tensor:
    assert statistics.hessian is not None
    hessian = statistics.hessian.double()
    return hessian + damping * hessian.diagonal().mean() * torch.eye(hessian.shape[0])


def obq(weight: torch.Tensor, hessian: torch.Tensor, quantize, prune=None, block: int = 1) -> torch.Tensor:
    """Optimal Brain Surgeon in float64, one column after the other, the inverse Hessian updated in full every time.

    `quantize(column, j)` gives the grid values; `prune(scores [out, block], first)` the mask of `block` columns (True = kept).
    """
    weight, inverse = weight.double().clone(), torch.linalg.inv(hessian)
    columns = weight.shape[1]
    kept = torch.ones_like(weight, dtype=torch.bool)
    for j in range(columns):
        if prune is not None and j % block == 0:
            # Saliency of a column when the ones before it in the block are gone already.
            remaining, scores = inverse.clone(), []
            for k in range(j, min(j + block, columns)):
                scores.append(weight[:, k] ** 2 / remaining[k, k])
                remaining = remaining - torch.outer(remaining[:, k], remaining[k]) / remaining[k, k]
            kept[:, j : j + block] = prune(torch.stack(scores, 1), j)
        value = torch.where(kept[:, j], quantize(weight[:, j], j), torch.zeros(()).double())
        error = (weight[:, j] - value) / inverse[j, j]
        weight -= torch.outer(error, inverse[j])
        weight[:, j] = value
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j], inverse[:, j] = 0, 0
        inverse[j, j] = 1
    return torch.where(kept, weight, 0)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 16, True), (3, "channel", False), (2, 24, False), (8, "tensor", True)]
)
def test_gptq_gives_the_codes_of_the_reference(bits: int, group: int | str, symmetric: bool) -> None:
    weight, statistics = problem(12, 80)
    config = QUANTIZE["gptq"].config(
        bits=bits,
        group_size=group,
        symmetric=symmetric,
        order="natural",
        scales="minmax",
        block_size=32,
        static_groups=True,
        sweeps=0,
    )
    scheme = resolve_scheme(config)
    assert scheme.weights is not None
    grid = make_grid(weight, scheme.weights, torch.float32, "minmax")
    scale, zero = grid.expand(80)
    scale = scale.double().expand(12, 80)
    zero = torch.zeros_like(scale) if zero is None else zero.double().expand(12, 80)
    low, high = scheme.weights.code_range

    def quantize(column: torch.Tensor, j: int) -> torch.Tensor:
        codes = ((column / scale[:, j]).round() + zero[:, j]).clamp(low, high)
        return (codes - zero[:, j]) * scale[:, j]

    expected = obq(weight, damped(statistics), quantize)
    (result,) = solve_group(Problem([weight], statistics, None, config, scheme, torch.float32))
    # float32 against float64: a value exactly between two codes may go either way, and every later column with it.
    differs = (result.weight.dequantize().double() - expected).abs().amax(1) > 1e-4
    assert result.notes["rows_replaced"] <= 1
    assert int(differs.sum()) <= result.notes["rows_replaced"] + 1


@pytest.mark.parametrize(
    ("pattern", "sparsity", "block"), [("2:4", None, 4), ("1:4", None, 4), ("4:8", None, 8), ("unstructured", 0.5, 16)]
)
def test_sparsegpt_gives_the_mask_of_the_reference(pattern: str, sparsity: float | None, block: int) -> None:
    weight, statistics = problem(8, 64)
    config = PRUNE["sparsegpt"].config(
        pattern=pattern,
        sparsity=sparsity,
        order="natural",
        mask_search="greedy",
        reconstruction=0,
        swaps=0,
        block_size=16,
    )

    def prune(scores: torch.Tensor, first: int) -> torch.Tensor:
        if sparsity is None:
            keep = int(pattern.split(":")[0])
            return scores.argsort(1).argsort(1) >= block - keep
        return scores > scores.flatten().kthvalue(int(sparsity * scores.numel())).values

    expected = obq(weight, damped(statistics), lambda column, j: column, prune, block)
    (result,) = solve_group(Problem([weight], statistics, config, None, resolve_scheme(None, pattern), torch.float32))
    assert torch.equal(result.weight.mask, expected != 0)
    torch.testing.assert_close(result.weight.values, expected.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_gptq_lies_between_brute_force_and_nearest(seed: int) -> None:
    weight, statistics = problem(1, 6, seed=seed)
    config = QUANTIZE["gptq"].config(bits=2, group_size="channel", symmetric=True, static_groups=True, sweeps=0)
    scheme = resolve_scheme(config)
    (result,) = solve_group(Problem([weight], statistics, None, config, scheme, torch.float32))
    rounded = QUANTIZE["rtn"].config(bits=2, group_size="channel", symmetric=True)
    (plain,) = solve_group(Problem([weight], statistics, None, rounded, scheme, torch.float32))
    codes = torch.tensor(list(itertools.product(range(-2, 2), repeat=6)), dtype=torch.float32)
    assert result.weight.scale is not None
    difference = weight - codes * result.weight.scale
    assert statistics.hessian is not None
    every = ((difference @ statistics.hessian) * difference).sum(1) / (weight @ statistics.hessian @ weight.T)
    assert float(every.min()) * (1 - 1e-5) <= result.error <= plain.error * (1 + 1e-5)
