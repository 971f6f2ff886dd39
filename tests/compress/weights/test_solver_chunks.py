"""Rows solved in chunks, wide layers (where the sketch judges), and groups larger than a block."""

from __future__ import annotations

import pytest
import torch

from compress.core.method import Problem
from compress.core.statistics import Statistics, StatisticsCollector
from compress.prune import METHODS as PRUNE
from compress.quantize import METHODS as QUANTIZE
from compress.quantize import resolve_scheme
from compress.quantize.grid import Grid
from compress.weights.solver import columns as chunks
from compress.weights.solver import compensate, loop
from compress.weights.solver.factor import factorize
from compress.weights.solver.group import solve_group
from runtime.formats.scheme import GridScheme


def inputs(columns: int, tokens: int, seed: int, correlated: float = 0.6) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, 1:] += correlated * x[:, :-1]
    collector = StatisticsCollector(columns)
    collector.add(x)
    return collector.finish()


def output_errors(weight: torch.Tensor, result, statistics: Statistics) -> torch.Tensor:
    assert statistics.hessian is not None
    e = (weight - result.weight.dequantize().float()).double()
    return ((e @ statistics.hessian.double()) * e).sum(1)


def test_every_row_is_in_one_chunk() -> None:
    for heights in ([5], [300, 7, 256], [1, 1, 1], [1000]):
        for split in (True, False):
            seen = [torch.zeros(h) for h in heights]
            for chunk in chunks.chunks(heights, chunks.ELEMENTS // 256, split):
                for index, start, end in chunk.parts:
                    seen[index][start:end] += 1
                    assert split or (start, end) == (0, heights[index])
            assert all((s == 1).all() for s in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_chunks_give_what_the_whole_gives(pattern: str | None, dtype: torch.dtype, monkeypatch) -> None:
    statistics = inputs(64, 300, 1)
    w = [torch.randn(h, 64, generator=torch.Generator().manual_seed(h)).to(dtype) for h in (300, 70, 290)]
    prune = None if pattern is None else PRUNE["sparsegpt"].config(pattern=pattern)
    config = QUANTIZE["gptq"].config(bits=3, group_size=16)
    scheme = resolve_scheme(config, pattern)
    whole = solve_group(Problem(w, statistics, prune, config, scheme, dtype))
    monkeypatch.setattr(chunks, "ELEMENTS", 256 * 64)
    parts = solve_group(Problem(w, statistics, prune, config, scheme, dtype))
    for a, b in zip(whole, parts, strict=True):
        # Products of another width are summed in another order; a tie may fall the other way, and a scale end in another bit.
        rows = (a.weight.values == b.weight.values).all(1)
        scales = torch.isclose(a.weight.scale, b.weight.scale, rtol=1e-5, atol=0).all(1)
        assert (rows & scales).float().mean() > 0.97
        assert a.error == pytest.approx(b.error, rel=1e-3)


@pytest.mark.parametrize("sweeps", [0, 1])
@pytest.mark.parametrize("correlated", [0.0, 0.6])
@pytest.mark.parametrize("bits", [2, 4])
def test_wide_rows_are_never_above_nearest(bits: int, correlated: float, sweeps: int) -> None:
    """More columns than the exact comparison is made for: most rows are judged by the sketch. Without correlation nothing is won
    by compensation, so that many rows are close."""
    columns = 2 * compensate.SKETCH + 88
    statistics = inputs(columns, 5000, 2, correlated)
    w = torch.randn(40, columns, generator=torch.Generator().manual_seed(5))
    w[3] *= 1e-3
    w[7, :50] = 0
    config = QUANTIZE["gptq"].config(bits=bits, group_size=75, sweeps=sweeps)
    (ours,) = solve_group(Problem([w], statistics, None, config, resolve_scheme(config), torch.float32))
    rtn = QUANTIZE["rtn"].config(bits=bits, group_size=75)
    (plain,) = solve_group(Problem([w], statistics, None, rtn, resolve_scheme(rtn), torch.float32))
    # The nearest rounding is compared on GPTQ's own grid, which weighs columns by their energy.
    a, b = output_errors(w, ours, statistics), output_errors(w, plain, statistics)
    assert (a <= b * (1 + 1e-3)).all()
    assert ours.error == pytest.approx(
        float(a.sum() / ((w.double() @ statistics.hessian.double()) * w).sum()), rel=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sweeps", [0, 1, 2])
def test_rounding_by_the_dtype_does_not_break_the_promise(bits: int, dtype: torch.dtype, sweeps: int) -> None:
    """Eight bits and uncorrelated inputs: nothing to win, and bfloat16 rounds the values about as much as the grid does."""
    columns = 256
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        collector = StatisticsCollector(columns)
        collector.add(torch.randn(4000, columns, generator=generator))
        statistics = collector.finish()
        w = torch.randn(200, columns, generator=generator).to(dtype)
        fields = {"bits": bits, "group_size": 64, "scales": "minmax"}
        config, rtn = QUANTIZE["gptq"].config(**fields, sweeps=sweeps), QUANTIZE["rtn"].config(**fields)
        (ours,) = solve_group(Problem([w], statistics, None, config, resolve_scheme(config), dtype))
        (plain,) = solve_group(Problem([w], statistics, None, rtn, resolve_scheme(rtn), dtype))
        a, b = (output_errors(w.float(), result, statistics) for result in (ours, plain))
        assert (a <= b * (1 + 1e-4)).all()


def test_a_group_may_mix_dtypes() -> None:
    statistics = inputs(64, 300, 1)
    first, second = (torch.randn(8, 64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    config = QUANTIZE["gptq"].config(bits=8, group_size=16)
    together = solve_group(
        Problem([first.bfloat16(), second], statistics, None, config, resolve_scheme(config), torch.float32)
    )
    (alone,) = solve_group(Problem([second], statistics, None, config, resolve_scheme(config), torch.float32))
    assert torch.equal(together[1].weight.values, alone.weight.values)


def test_the_reported_error_is_that_of_the_stored_weight() -> None:
    statistics = inputs(96, 400, 3)
    w = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    for method, fields in (("gptq", {"sweeps": 0}), ("gptq", {"sweeps": 2}), ("rtn", {})):
        for bits in (3, 8):
            config = QUANTIZE[method].config(bits=bits, group_size=32, **fields)
            (result,) = solve_group(Problem([w], statistics, None, config, resolve_scheme(config), torch.bfloat16))
            total = ((w.double() @ statistics.hessian.double()) * w.double()).sum()
            exact = output_errors(w.float(), result, statistics).sum() / total
            assert result.error == pytest.approx(float(exact), rel=5e-3)


def test_the_factor_is_that_of_the_hessian_in_visiting_order() -> None:
    statistics = inputs(75, 300, 4)
    order = torch.randperm(75, generator=torch.Generator().manual_seed(0))
    factor = factorize(statistics.hessian, order, 0.02)
    lower = factor.corner(0, 75).double()
    assert torch.equal(lower, lower.tril())
    expected = statistics.hessian.double()[order][:, order] + factor.added * torch.eye(75)
    torch.testing.assert_close(lower.T @ lower, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([factor.panel(30, 50), factor.corner(30, 50)], 1).double(), lower[30:50, :50])
    torch.testing.assert_close(factor.diagonal.double(), lower.diagonal())
    sketch = factor.sketch(4000).double()
    torch.testing.assert_close((sketch.T @ sketch).trace(), expected.trace(), rtol=0.05, atol=0)


@pytest.mark.parametrize("group", [40, 24])
def test_scales_set_on_arrival_see_the_whole_group(group: int) -> None:
    """Groups that begin inside a block and reach beyond it: the chooser gets every column as OBS in float64 would have it by then."""
    columns, rows = 80, 6
    statistics = inputs(columns, 400, 6)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(columns, rows, generator=generator)
    seen: dict[int, torch.Tensor] = {}

    def choose(first: int, last: int, adjusted: torch.Tensor, kept) -> Grid:
        seen[first] = adjusted.clone()
        return Grid(GridScheme(2), adjusted.abs().amax(0) / 1.5, None)

    scheme = GridScheme(bits=2, type="int", symmetric=True, strategy="group", group_size=group)
    index = [j // group for j in range(columns)]
    grid = loop.ColumnGrid(Grid(GridScheme(2), torch.ones(index[-1] + 1, rows), None), index, choose)
    order = torch.arange(columns)
    solution = loop.run(weight.clone(), factorize(statistics.hessian, order, 0.01), grid, block=16)
    assert scheme.group_size == group
    values = weight.double() - solution.error.double()
    hessian = statistics.hessian.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    for first, adjusted in seen.items():
        last = min(first + group, columns)
        assert adjusted.shape[0] == last - first
        if first == 0:
            torch.testing.assert_close(adjusted, weight[:last])
            continue
        # The best the later columns can do about what is lost in the earlier ones.
        lost = (weight.double() - values)[:first]
        best = -torch.linalg.solve(hessian[first:, first:], hessian[first:, :first] @ lost)
        torch.testing.assert_close(
            adjusted.double(), weight[first:last].double() - best[: last - first], rtol=1e-3, atol=1e-3
        )
