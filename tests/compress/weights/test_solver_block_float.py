"""The solvers on block floats: C and torch agree, no single code can be better, error compensation beats rounding to nearest."""

from __future__ import annotations

import json
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
from compress.weights import block
from compress.weights.solver.columns import nearest_rows
from compress.weights.solver.compensate import LayerResult
from compress.weights.solver.group import solve_group
from runtime import formats
from runtime.formats.block_float import BlockFloat
from runtime.formats.scheme import CompressedWeight

KINDS = ["NVFP4A16", "MXFP4A16", "MXFP8A16"]
HALVES = torch.tensor([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12])


def inputs(columns: int) -> Statistics:
    collector = StatisticsCollector(columns)
    collector.add(torch.randn(400, columns) @ (torch.randn(columns, columns) / columns**0.5 + 0.2 * torch.eye(columns)))
    return collector.finish()


def solve(
    weights: list[torch.Tensor], statistics: Statistics | None, method: str, **fields: object
) -> list[LayerResult]:
    config = METHODS[method].config(**fields)
    return solve_group(Problem(weights, statistics, None, config, resolve_scheme(config), torch.bfloat16))


def lost(weight: torch.Tensor, found: CompressedWeight, statistics: Statistics) -> torch.Tensor:
    return row_errors(weight - found.dequantize().float(), statistics.hessian)


@pytest.mark.parametrize("scheme", KINDS)
def test_no_row_is_worse_than_rounded_to_nearest_and_most_are_better(scheme: str) -> None:
    statistics, weights = inputs(96), [torch.randn(33, 96), 0.01 * torch.randn(40, 96)]
    nearest, solved = (solve(weights, statistics, method, scheme=scheme) for method in ("rtn", "gptq"))
    for weight, plain, ours in zip(weights, nearest, solved, strict=True):
        before, after = lost(weight, plain.weight, statistics), lost(weight, ours.weight, statistics)
        assert bool((after <= before * (1 + 1e-4)).all())
        assert float(after.sum()) < 0.8 * float(before.sum())
        assert ours.error == pytest.approx(float(after.sum() / row_errors(weight, statistics.hessian).sum()), rel=1e-3)
    if scheme == "NVFP4A16":  # engines fuse layers that read the same input
        assert torch.equal(*(found.weight.parameters["global_scale"] for found in solved))


@pytest.mark.parametrize("scales", ["mse", "hessian"])
@pytest.mark.parametrize("scheme", KINDS[:2])
def test_the_loops_in_c_are_those_of_torch(scheme: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.usable():
        pytest.skip("no C compiler")
    statistics, weight = inputs(96), torch.randn(70, 96)
    (in_c,) = solve([weight], statistics, "gptq", scheme=scheme, scales=scales)
    monkeypatch.setattr(native, "usable", lambda *_: False)
    (in_torch,) = solve([weight], statistics, "gptq", scheme=scheme, scales=scales)
    # A value between two codes may go either way, and the later columns of its row with it.
    equal = (in_c.weight.values == in_torch.weight.values).all(1)
    assert float(equal.float().mean()) > 0.8
    assert in_c.error == pytest.approx(in_torch.error, rel=0.02)


def test_no_single_code_can_be_better() -> None:
    statistics, weight = inputs(64), torch.randn(12, 64)
    hessian = statistics.hessian
    assert hessian is not None
    (found,) = solve([weight], statistics, "gptq", scheme="MXFP4A16", sweeps=60, refit_scales=False)
    kind, hessian = BlockFloat(4), hessian.double()
    steps = kind.steps(found.weight.parameters).double().repeat_interleave(32, 1)
    error = weight.double() - found.weight.values * steps
    least = ((error @ hessian) * error).sum(1)
    for column in range(64):
        for code in HALVES:
            other = error.clone()
            other[:, column] = weight[:, column].double() - code * steps[:, column]
            assert bool((((other @ hessian) * other).sum(1) >= least * (1 - 1e-6)).all()), (column, int(code))


def test_a_block_may_map_its_largest_value_to_four() -> None:
    """Where that is better: values at 4, 3, 2 and 1 of a scale that is 1.5 times as large as the covering one (Four Over Six)."""
    kind = BlockFloat(4, group_size=16, scales="e4m3")
    values = torch.tensor([4.0, 3, 2, 1, -4, -3, -2, -1] * 2)[None]
    grid = make_grid(values, kind.with_global_scale([values]), torch.bfloat16, "mse")
    assert torch.equal(grid.values(grid.codes(values)), values)
    covering = make_grid(values, kind.with_global_scale([values]), torch.bfloat16, "minmax")
    assert not torch.equal(covering.values(covering.codes(values)), values)


@pytest.mark.parametrize("scheme", KINDS)
def test_large_weights_are_rounded_by_rows(scheme: str) -> None:
    weight = torch.randn(300, 4096)
    (found,) = solve([weight], None, "rtn", scheme=scheme)
    assert nearest_rows(4096) < 300
    assert relative(found.weight.dequantize(), weight) < 0.13
    storage = formats.choose(found.weight.scheme, (300, 4096))
    again = storage.unpack(storage.pack(found.weight), found.weight.scheme, (300, 4096), torch.bfloat16)
    assert torch.equal(again.dequantize(), found.weight.dequantize())


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_layers_that_engines_fuse_share_the_global_scales(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "SOLVED_AT_ONCE", 1)  # every layer by itself
    request = recipe(make_checkpoint(), {"quantize": {"method": method, "scheme": "NVFP4"}})
    path = compress.apply(request, output=tmp_path / "out", quiet=True).path
    found = {name: tensor for file in path.glob("model-*.safetensors") for name, tensor in load_file(file).items()}
    layer = "model.layers.1"
    for kind in ("weight", "input"):
        scale = {
            name: float(found[f"{layer}.{name}_proj.{kind}_global_scale"])
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "mlp.down")
        }
        assert scale["self_attn.q"] == scale["self_attn.k"] == scale["self_attn.v"]
        assert scale["mlp.gate"] == scale["mlp.up"]
        assert len(set(scale.values())) == 3


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("scheme", KINDS)
def test_an_artifact_runs_here_and_in_transformers(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, scheme: str, method: str
) -> None:
    from transformers import AutoModelForCausalLM

    request = recipe(make_checkpoint(), {"quantize": {"method": method, "scheme": scheme}})
    path = compress.apply(request, output=tmp_path / "out", quiet=True).path
    ids = torch.randint(0, 257, (2, 20))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(ids).logits
    model = runtime.load(path)
    assert relative(model.logits(ids), theirs) < 0.03  # rounding to bf16 in every operation
    manifest = json.loads((path / "compress.json").read_text())
    readers = {reader["name"]: reader["how"] for reader in manifest["readable_by"]}
    assert readers["transformers"] == "yes"
    assert readers["vLLM"] == ("no" if scheme == "MXFP8A16" else "yes")
    assert readers["SGLang"] == "no"
