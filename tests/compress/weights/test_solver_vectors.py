"""The column loop over vectors of columns: against its own algebra, beside rounding to nearest, refined, and row after row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.core.method import DEFAULTS, Problem
from compress.core.statistics import Statistics, StatisticsCollector
from compress.quantize import METHODS, resolve_scheme
from compress.weights.solver import columns, group
from compress.weights.solver.factor import factorize
from compress.weights.solver.group import solve_group
from compress.weights.solver.vectors import VectorSolver
from runtime import formats
from runtime.errors import RequestError
from runtime.formats.representation import Representation
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import representation_of
from runtime.formats.trellis import Trellis

COLUMNS = 128
TRELLIS = {"representation": "trellis", "group_size": 64}
CODEBOOKS = [
    {"representation": "row_codebook", "bits": 3},
    {"representation": "row_codebook", "bits": 2, "group_size": 32, "outliers": 0.02},
]
TERNARY = {"representation": "ternary_dictionary", "zeros": 0.6}
every_scheme = pytest.mark.parametrize(
    "scheme", [TRELLIS, *CODEBOOKS, TERNARY], ids=["trellis", "codebook", "groups, outliers", "ternary"]
)


def inputs(columns: int = COLUMNS, seed: int = 0) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    collector = StatisticsCollector(columns)
    collector.add(torch.randn(1000, columns, generator=generator) @ torch.randn(columns, columns, generator=generator))
    return collector.finish()


def normal(rows: int, columns: int = COLUMNS, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def solved(
    weights: list[torch.Tensor], method: str = "gptq", hessians: Any = None, scheme: Any = TRELLIS, **fields: Any
) -> list[Any]:
    config = METHODS[method].config(method=method, scheme=scheme, **fields)
    names = [f"layer{index}" for index in range(len(weights))]
    return solve_group(
        Problem(weights, inputs(), None, config, resolve_scheme(config), torch.float32, names, output_hessians=hessians)
    )


def loss(weight: torch.Tensor, found: Any) -> float:
    error, hessian = weight - found.weight.dequantize(), inputs().hessian
    assert hessian is not None
    return float((error @ hessian * error).sum())


def test_the_metric_is_what_later_columns_cannot_make_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a vector costs the least of `e^T H e` over the columns that come after it, in float64."""
    hessian = inputs().hessian
    assert hessian is not None
    seen: dict[int, torch.Tensor] = {}
    nearest = Trellis.nearest

    def spy(self: Trellis, columns: Any, parameters: Any, first: int, metric: Any = None) -> Any:
        if metric is not None:
            seen[first] = metric
        return nearest(self, columns, parameters, first, metric)

    monkeypatch.setattr(Trellis, "nearest", spy)
    order = torch.arange(COLUMNS).view(-1, 16).flip(0).flatten()
    factor = factorize(hessian, order, 0.01, "layer")
    solver = VectorSolver(
        Trellis(64), hessian, order, factor, torch.float32, replace(DEFAULTS, block_size=32, sweeps=0)
    )
    weight = normal(5)
    solver.solve(weight, solver.fit(weight))
    assert len(seen) == COLUMNS // 16
    wanted = hessian.double() + factor.added * torch.eye(COLUMNS)
    for first, metric in seen.items():
        own, later = torch.arange(first, first + 16), torch.arange(first)  # visited from the back
        best = wanted[own][:, own]
        if len(later):
            cross = wanted[own][:, later]
            best = best - cross @ torch.linalg.solve(wanted[later][:, later], cross.T)
        assert torch.allclose(metric.double(), best, rtol=1e-3, atol=1e-3 * float(best.diagonal().mean()))


@every_scheme
def test_the_column_loop_beats_rounding_and_sweeps_only_gain(scheme: Any) -> None:
    weights = [normal(40), normal(24, seed=2)]
    rounded, alone, swept, most = (
        solved(weights, method, scheme=scheme, **fields)
        for method, fields in (("rtn", {}), ("gptq", {"sweeps": 0}), ("gptq", {"sweeps": 1}), ("gptq", {"sweeps": 4}))
    )
    for weight, nearest, once, more, last in zip(weights, rounded, alone, swept, most, strict=True):
        assert loss(weight, once) < 0.7 * loss(weight, nearest)
        assert loss(weight, more) < 0.98 * loss(weight, once)
        assert loss(weight, last) <= loss(weight, more)
        for one in (once, more, last):
            assert one.lost == pytest.approx(loss(weight, one), rel=2e-3), "what is reported"


@every_scheme
def test_no_row_is_worse_than_rounded_to_nearest(scheme: Any) -> None:
    weight, hessian = normal(64), inputs().hessian
    assert hessian is not None
    found, nearest = (solved([weight], method, scheme=scheme)[0].weight.dequantize() for method in ("gptq", "rtn"))
    rows = [((weight - dense) @ hessian * (weight - dense)).sum(1) for dense in (found, nearest)]
    form = representation_of(scheme)
    own = form.fit(weight, torch.float32, hessian.diagonal())
    again = weight - form.dequantize(form.round(weight, own), own, torch.float32)
    assert bool((rows[0] <= (again @ hessian * again).sum(1) * (1 + 1e-5)).all())
    assert float(rows[0].sum()) < float(rows[1].sum())


def test_closer_than_a_grid_of_as_many_bits() -> None:
    weight = normal(48)
    config = METHODS["gptq"].config(method="gptq", bits=2, group_size=64)
    grid = solve_group(Problem([weight], inputs(), None, config, resolve_scheme(config), torch.float32, ["a"]))[0]
    assert loss(weight, solved([weight])[0]) < 0.8 * loss(weight, grid)


def test_ternary_weights_below_one_bit() -> None:
    """Stored sizes, of which levels and offsets are 0.06 bits a weight here."""
    collector = StatisticsCollector(1024)
    mix = normal(1024, 1024, seed=3)
    collector.add(normal(3000, 1024, seed=4) @ (mix / 32 + 2 * torch.eye(1024)))
    statistics, weight = collector.finish(), normal(64, 1024)
    assert statistics.hessian is not None
    lost, bits = {}, {}
    for method in ("rtn", "gptq"):
        config = METHODS[method].config(method=method, scheme="TERNARY")
        names = ["layer"]
        found = solve_group(Problem([weight], statistics, None, config, resolve_scheme(config), torch.bfloat16, names))
        stored = formats.get("ternary_dictionary").pack(found[0].weight)
        error = weight - found[0].weight.dequantize().float()
        lost[method] = float((error @ statistics.hessian * error).sum())
        bits[method] = 8 * sum(tensor.nbytes for tensor in stored.values()) / weight.numel()
    assert lost["gptq"] < 0.8 * lost["rtn"]
    assert bits["rtn"] < bits["gptq"] < 1, "weights that make up for others' errors are zero less often"


@every_scheme
def test_rows_make_up_for_rows_before_them(scheme: Any) -> None:
    """With output Hessians the loss of the model falls, and what the layer itself loses rises."""
    weights = [normal(48), normal(32, seed=4)]
    hessians = []
    for seed, weight in enumerate(weights):
        outputs = normal(300, len(weight), 9 + seed) @ normal(len(weight), len(weight), 20 + seed)
        hessians.append(outputs.T @ outputs / 300)
    lost, own = [], []
    for given in (None, hessians):
        found = solved(weights, hessians=given, scheme=scheme, sweeps=1)
        errors = [weight - one.weight.dequantize() for weight, one in zip(weights, found, strict=True)]
        inner = inputs().hessian
        assert inner is not None
        lost.append(sum(float((h * (e @ inner @ e.T)).sum()) for h, e in zip(hessians, errors, strict=True)))
        own.append(sum(loss(weight, one) for weight, one in zip(weights, found, strict=True)))
    assert lost[1] < 0.9 * lost[0], lost
    assert own[1] > own[0]


@pytest.mark.parametrize(
    "scheme",
    [{"representation": "trellis", "group_size": 32}, "FP8_BLOCK", *CODEBOOKS, TERNARY],
    ids=str,
)
@pytest.mark.parametrize("used", [0, 31])
def test_columns_that_no_input_uses(scheme: Any, used: int) -> None:
    x = normal(200, 32)
    x[:, used:] = 0
    collector = StatisticsCollector(32)
    collector.add(x)
    config = METHODS["gptq"].config(method="gptq", scheme=scheme, sweeps=2)
    weight = normal(300, 32)
    problem = Problem([weight], collector.finish(), None, config, resolve_scheme(config), torch.bfloat16, ["a"])
    dense = solve_group(problem)[0].weight.dequantize()
    assert dense.dtype == torch.bfloat16
    assert float((dense - weight).norm() / weight.norm()) < 0.6


@every_scheme
def test_chunks_of_rows_give_what_the_whole_gives(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [normal(40), normal(24, seed=2)]
    whole = [one.weight.dequantize() for one in solved(weights, scheme=scheme)]
    rounded = [one.weight.dequantize() for one in solved(weights, "rtn", scheme=scheme)]
    monkeypatch.setattr(columns, "rows_at_a_time", lambda _columns: 7)
    monkeypatch.setattr(group, "nearest_rows", lambda _columns: 5)
    for method, wanted in (("gptq", whole), ("rtn", rounded)):
        for one, dense in zip(solved(weights, method, scheme=scheme), wanted, strict=True):
            assert float((one.weight.dequantize() - dense).abs().max()) < 1e-4 * float(dense.abs().max())


@pytest.mark.parametrize("option", [{"scales": "hessian"}, {"static_groups": True}, {"refit_scales": False}], ids=str)
def test_options_of_grids_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(RequestError, match=f"{name} applies to grids only, and trellis 2 bits g64 fits its own scales"):
        solved([normal(4)], **option)


def test_parameters_that_rows_share_are_never_refitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row would keep its own codes and get the parameters of another's."""
    monkeypatch.setattr(RowCodebook, "row_by_row", False)
    assert not Representation.rows_apart.fget(RowCodebook(3))  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="row_codebook refits parameters, and its rows share them"):
        solved([normal(4)], scheme=CODEBOOKS[0])
