"""The solvers on k-quants: C and torch agree, no code, scale, minimum or factor can be better by itself, compensation beats rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import compress
import runtime
from compress.core import native
from compress.core.method import Problem, Statistics
from compress.core.tensors import relative
from compress.model.input_statistics import StatisticsCollector
from compress.quantize import METHODS, resolve_scheme
from compress.quantize.grid import make_grid
from compress.quantize.objective import row_errors
from compress.weights.solver.compensate import LayerResult
from compress.weights.solver.group import solve_group
from runtime.errors import RequestError
from runtime.formats.k_quant import IQ4_VALUES, KINDS, KQuant
from runtime.formats.scheme import CompressedWeight

SOME = ["Q2_K", "Q3_K", "Q4_K", "IQ4_XS"]


def inputs(columns: int) -> Statistics:
    collector = StatisticsCollector(columns)
    mixed = torch.randn(columns, columns) / columns**0.5 + 0.2 * torch.eye(columns)
    collector.add(torch.randn(2 * columns, columns) @ mixed)
    return collector.finish()


def solve(
    weights: list[torch.Tensor], statistics: Statistics | None, dtype: torch.dtype = torch.bfloat16, **fields: object
) -> list[LayerResult]:
    config = METHODS[str(fields.pop("method", "gptq"))].config(**fields)
    return solve_group(Problem(weights, statistics, None, config, resolve_scheme(config), dtype))


def lost(weight: torch.Tensor, found: CompressedWeight, statistics: Statistics) -> torch.Tensor:
    return row_errors(weight - found.dequantize().float(), statistics.hessian)


@pytest.mark.parametrize("scheme", KINDS)
def test_no_row_is_worse_than_rounded_to_nearest_and_most_are_better(scheme: str) -> None:
    statistics, weights = inputs(512), [torch.randn(33, 512), 0.01 * torch.randn(40, 512)]
    nearest, solved = (solve(weights, statistics, method=method, scheme=scheme) for method in ("rtn", "gptq"))
    for weight, plain, ours in zip(weights, nearest, solved, strict=True):
        before, after = lost(weight, plain.weight, statistics), lost(weight, ours.weight, statistics)
        assert bool((after <= before * (1 + 1e-4)).all())
        assert float(after.sum()) < 0.7 * float(before.sum())
        assert ours.error == pytest.approx(float(after.sum() / row_errors(weight, statistics.hessian).sum()), rel=1e-3)


@pytest.mark.parametrize("scales", ["mse", "hessian"])
@pytest.mark.parametrize("scheme", SOME)
def test_the_loops_in_c_are_those_of_torch(scheme: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.usable():
        pytest.skip("no C compiler")
    statistics, weight = inputs(256), torch.randn(70, 256)
    (in_c,) = solve([weight], statistics, scheme=scheme, scales=scales, refit_scales=False)
    monkeypatch.setattr(native, "usable", lambda *_: False)
    (in_torch,) = solve([weight], statistics, scheme=scheme, scales=scales, refit_scales=False)
    # A value between two codes may go either way, and the later columns of its row with it.
    equal = (in_c.weight.values == in_torch.weight.values).all(1)
    assert float(equal.float().mean()) > 0.6
    assert in_c.error == pytest.approx(in_torch.error, rel=0.02)


@pytest.mark.parametrize("order", ["group", "natural", "activation"])
@pytest.mark.parametrize("static", [True, False])
def test_every_order_of_columns_compensates(order: str, static: bool) -> None:
    statistics, weight = inputs(512), torch.randn(20, 512)
    (plain,) = solve([weight], statistics, method="rtn", scheme="Q4_K")
    (found,) = solve([weight], statistics, scheme="Q4_K", order=order, static_groups=static, sweeps=0)
    assert found.error < 0.75 * plain.error


@pytest.mark.parametrize("scheme", SOME)
def test_nothing_can_be_better_by_itself(scheme: str) -> None:
    """After many passes: no other code, no other integer scale or minimum, no factor next to the one there is."""
    statistics, weight, form = inputs(256), torch.randn(6, 256), KQuant(scheme)
    assert statistics.hessian is not None
    (found,) = solve([weight], statistics, torch.float32, scheme=scheme, sweeps=100)
    hessian, codes = statistics.hessian.double(), found.weight.values
    own, parameters = form.facts, found.weight.parameters

    def error(codes: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        away = weight.double() - form.dequantize(codes, parameters, torch.float64)
        return ((away @ hessian) * away).sum(1)

    least = error(codes, parameters) * (1 - 1e-5)
    every = IQ4_VALUES if form.table else range(form.code_range[0], form.code_range[1] + 1)
    for column in range(0, 256, 5):
        for code in every:
            other = codes.clone()
            other[:, column] = code
            assert bool((error(other, parameters) >= least).all()), (column, code)
    for name in [name for name in ("scale", "minimum") if name in parameters]:
        for group in range(256 // own.width):
            for step in (-1, 1):
                moved = parameters[name].clone()
                level = moved[:, group].int() + step
                low = 0 if name == "minimum" else own.low
                level = torch.where(
                    (level < low) | (level > own.high) | ((level == 0) & (name == "scale")), level - step, level
                )
                moved[:, group] = level.to(torch.int8)
                assert bool((error(codes, parameters | {name: moved}) >= least).all()), (name, group, step)
    for name in [name for name in ("d", "dmin") if name in parameters]:
        for step in (-1, 1):
            moved = (parameters[name].view(torch.int16) + step).view(torch.float16)
            assert bool((error(codes, parameters | {name: moved}) >= least).all()), (name, step)


@pytest.mark.parametrize("scheme", KINDS)
def test_hostile_weights(scheme: str) -> None:
    weight = torch.randn(12, 512) * torch.logspace(-6, 1, 12)[:, None]
    weight[1], weight[2, :32], weight[3, 5], weight[4] = 0, 0, 300.0, 1e-39
    weight[5], weight[6] = weight[5].abs(), -weight[6].abs()
    statistics = inputs(512)
    statistics.hessian[7], statistics.hessian[:, 7] = 0, 0  # type: ignore[index]
    for method in ("rtn", "gptq"):
        (found,) = solve([weight], statistics, method=method, scheme=scheme)
        dense = found.weight.dequantize()
        assert bool(dense.isfinite().all())
        assert float(dense[1].abs().max()) < (1e-6 if KQuant(scheme).table else 1e-30)  # IQ4 has no zero, but 1
        limit = {2: 0.5, 3: 0.3}.get(KQuant(scheme).bits, 0.2)
        for row in (2, 7, 8, 9, 10, 11):
            assert relative(dense[row].float(), weight[row]) < limit, row


@pytest.mark.parametrize("scheme", KINDS)
def test_a_group_of_zeros_does_not_guide_its_block(scheme: str) -> None:
    weight = 0.01 * torch.randn(16, 256)
    grid = make_grid(weight, KQuant(scheme), torch.bfloat16)
    before = (grid.values(grid.codes(weight)) - weight)[:, 32:].norm()
    weight[:, :32] = 0
    grid = make_grid(weight, KQuant(scheme), torch.bfloat16)
    values = grid.values(grid.codes(weight))
    assert float((values - weight)[:, 32:].norm()) < 1.1 * float(before)
    assert float(values[:, :32].abs().max()) < (2e-5 if KQuant(scheme).table else 1e-30)  # IQ4 has no zero, but 1


@pytest.mark.parametrize("scheme", KINDS)
def test_the_search_is_better_than_covering_the_range(scheme: str) -> None:
    weight, importance = torch.randn(64, 512), torch.rand(512)
    errors = []
    for search in ("minmax", "mse"):
        grid = make_grid(weight, KQuant(scheme), torch.float32, search, importance)  # type: ignore[arg-type]
        parameters = KQuant(scheme).parameters_of(grid.scale, grid.zero, torch.float32)
        values = KQuant(scheme).dequantize(grid.codes(weight).to(torch.int8), parameters, torch.float32)
        assert torch.equal(values, grid.values(grid.codes(weight)))  # what the solver sees is what is stored
        errors.append(float(((values - weight).square() @ importance).sum()))
    assert errors[1] < 0.995 * errors[0]


@pytest.mark.parametrize(("scheme", "method"), [("Q4_K", "gptq"), ("Q2_K", "rtn"), ("Q6_K", "awq")])
def test_an_artifact_runs(make_checkpoint: Any, recipe: Any, tmp_path: Path, scheme: str, method: str) -> None:
    from transformers import AutoModelForCausalLM

    model = make_checkpoint(hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    request = recipe(model, {"quantize": {"method": method, "scheme": scheme}})
    foreseen = compress.plan(request)
    path = compress.apply(request, output=tmp_path / "out", quiet=True).path
    ids = torch.randint(0, 257, (2, 20))
    ours = runtime.load(path, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
    assert relative(ours.logits(ids), theirs) < 1e-4
    planned = sum(tensor.bytes_after for tensor in foreseen.tensors if tensor.action == "compressed")
    found = {name: tensor for file in path.glob("model-*.safetensors") for name, tensor in load_file(file).items()}
    assert planned == sum(tensor.nbytes for name, tensor in found.items() if name.endswith("weight_blocks")) > 0


def test_rows_that_are_no_blocks_are_refused_by_name(make_checkpoint: Any, recipe: Any) -> None:
    request = recipe(make_checkpoint(), {"quantize": {"method": "rtn", "scheme": "Q4_K"}})
    with pytest.raises(RequestError, match=r"model\.layers\.0\..*rows of \d+ weights are not whole blocks of 256"):
        compress.plan(request)
