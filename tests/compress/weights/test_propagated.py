"""The objective `propagated`: the least squares behind it, the drift that is collected for it, and what a run gains by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import same_bytes
from transformers import AutoModelForCausalLM

import compress
import runtime
from compress.core import file_matrix
from compress.core.statistics import Statistics, StatisticsCollector
from compress.core.tensors import relative
from compress.weights import block, block_pass
from compress.weights.solver import factor, group
from compress.weights.solver.group import DAMPING, propagated
from runtime.errors import CompressError, RequestError

ROWS = {"samples": 24, "sequence_length": 32, "batch_size": 4}


def collected(
    x: torch.Tensor, original: torch.Tensor, directory: Path | None = None, mask: torch.Tensor | None = None
) -> Statistics:
    collector = StatisticsCollector(x.shape[-1], directory=directory, drift=True)
    for part, other, real in zip(
        x.split(50),
        original.split(50),
        (mask if mask is not None else torch.ones(len(x)).bool()).split(50),
        strict=True,
    ):
        collector.add(part, real, other)
    return collector.finish()


def streams(tokens: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer reads now, and what it reads in the original model."""
    x = torch.randn(tokens, columns) @ (torch.eye(columns) + 0.3 * torch.randn(columns, columns) / columns**0.5)
    return x, x + 0.3 * torch.randn(tokens, columns) + 0.2 * x.roll(1, 1)


@pytest.mark.parametrize("filed", [False, True])
@pytest.mark.parametrize(("columns", "panel"), [(37, 1024), (70, 16), (64, 64)])
def test_weights_are_the_damped_least_squares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, panel: int, filed: bool
) -> None:
    """Against `lstsq` in float64 on the tokens themselves; the damping is further rows."""
    if filed and not file_matrix.AVAILABLE:
        pytest.skip("this system maps no matrices to files")
    monkeypatch.setattr(factor, "PANEL", panel)
    monkeypatch.setattr(group, "rows_at_a_time", lambda columns: 5)
    monkeypatch.setattr(group, "_share", lambda *_: 1.0)
    x, original = streams(400, columns)
    weights = [torch.randn(13, columns), torch.randn(4, columns).bfloat16()]
    before = [weight.clone() for weight in weights]
    found, _ = propagated(weights, collected(x, original, tmp_path if filed else None), "layer")
    added = DAMPING * float(x.square().mean(0).mean()) * len(x)
    for weight, kept, moved in zip(weights, before, found, strict=True):
        assert torch.equal(weight, kept)
        left = torch.cat([x.double(), added**0.5 * torch.eye(columns, dtype=torch.float64)])
        right = torch.cat([original.double() @ weight.double().T, added**0.5 * weight.double().T])
        expected = torch.linalg.lstsq(left, right).solution.T
        assert relative(moved, expected) < 1e-4
        assert relative(moved, weight) > 0.05, "nothing has moved"


@pytest.mark.parametrize("filed", [False, True])
def test_what_is_missing_in_the_residual_stream_is_part_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filed: bool
) -> None:
    """Against `lstsq` in float64; in a file no page stays resident."""
    if filed and not file_matrix.AVAILABLE:
        pytest.skip("this system maps no matrices to files")
    columns, rows = 40, 23
    monkeypatch.setattr(group, "rows_at_a_time", lambda columns: 5)
    shares: list[float] = []
    share = group._share
    monkeypatch.setattr(group, "_share", lambda *given: (shares.append(share(*given)), 1.0)[1])
    x, original = streams(400, columns)
    missing, weight = x @ torch.randn(columns, rows) / 6 + 0.1 * torch.randn(400, rows), torch.randn(rows, columns)
    collector = StatisticsCollector(columns, directory=tmp_path if filed else None, drift=True, outputs=rows)
    collector.add(x, None, original, missing)
    statistics = collector.finish()
    if filed:
        assert file_matrix.is_mapped(statistics.residual)
    (moved,), _ = propagated([weight], statistics, "layer")
    added = DAMPING * float(x.square().mean(0).mean()) * len(x)
    left = torch.cat([x.double(), added**0.5 * torch.eye(columns, dtype=torch.float64)])
    target = original.double() @ weight.double().T + group.RESIDUAL_SHARE * missing.double()
    right = torch.cat([target, added**0.5 * weight.double().T])
    assert relative(moved, torch.linalg.lstsq(left, right).solution.T) < 1e-4
    assert len(shares) == 2
    assert shares[1] > 0.9, "inputs explain nearly all that is missing"


@pytest.mark.parametrize("tokens", [90, 150, 2000])
def test_what_noise_explains_is_left_out(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """On other text the output is nearer to the original model's than without shrinkage, and than before, however few tokens there are."""
    columns, weight, turn = 48, torch.randn(64, 48), torch.randn(48, 48) / 48**0.5

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, columns)
        return x, x + 0.1 * x @ turn + 0.3 * torch.randn(count, columns)

    statistics, (x, original) = collected(*drawn(tokens)), drawn(4000)
    share = group._share(
        factor.factorize(statistics.hessian, torch.arange(columns), DAMPING),
        partial(file_matrix.product, statistics.drift),
        statistics.drifted,
        tokens,
    )
    (ours,), _ = propagated([weight], statistics, "layer")
    monkeypatch.setattr(group, "_share", lambda *_: 1.0)
    (whole,), _ = propagated([weight], statistics, "layer")
    errors = [float((x @ w.T - original @ weight.T).square().sum()) for w in (ours, whole, weight)]
    assert errors[0] < 1.01 * errors[2]
    assert errors[0] < errors[1] if tokens < 1000 else share > 0.7
    assert 0 <= share < 1


def test_fewer_tokens_than_inputs_move_nothing() -> None:
    x, weight = torch.randn(30, 40), torch.randn(7, 40)
    found, share = propagated([weight], collected(x, 1.1 * x), "layer")
    assert share == 0
    assert torch.equal(found[0], weight)


def test_pure_noise_moves_little() -> None:
    x, weight = torch.randn(200, 40), torch.randn(7, 40)
    found, _ = propagated([weight], collected(x, x + 0.3 * torch.randn(200, 40)), "layer")
    assert relative(found[0], weight) < 0.05


def test_no_drift_leaves_the_weights() -> None:
    x, weight = torch.randn(100, 12), torch.randn(5, 12)
    assert torch.equal(propagated([weight], collected(x, x.clone()), "layer")[0][0], weight)


def test_drift_counts_real_tokens_only_is_pooled_and_scaled() -> None:
    x, original = streams(120, 20)
    mask = torch.rand(120) < 0.7
    found = collected(x, original, mask=mask)
    real, others = x[mask].double(), original[mask].double()
    assert relative(found.drift, real.T @ (others - real) / len(real)) < 1e-5
    s = torch.rand(20) + 0.5
    scaled, again = found.scaled(s), collected(x / s, original / s, mask=mask)
    assert relative(scaled.drift, again.drift) < 1e-5
    assert relative(scaled.drifted, again.drifted) < 1e-5
    halves = [StatisticsCollector(20, drift=True) for _ in range(2)]
    for half, part in zip(halves, (slice(0, 50), slice(50, 120)), strict=True):
        half.add(x[part], mask[part], original[part])
    sent: list[tuple[torch.Tensor, str]] = []
    halves[1].pool(lambda tensor, how: sent.append((tensor.clone(), how)), 1, 2)
    combine: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}

    def reduce(tensor: torch.Tensor, how: str) -> None:
        other, alike = sent.pop(0)
        assert alike == how
        combine[how](tensor, other, out=tensor)

    halves[0].pool(reduce, 0, 2)
    pooled = halves[0].finish()
    assert relative(pooled.drift, found.drift) < 1e-5
    assert relative(pooled.drifted, found.drifted) < 1e-5


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Statistics], list[torch.Tensor]]:
    """Statistics by the first layer that was solved on them, and the calibration rows, of the next run."""
    known: dict[str, Statistics] = {}
    rows: list[torch.Tensor] = []
    solve, run = block.solve_layers, block_pass.run_block

    def noted(tasks: Any, modules: Any, weights: Any, statistics: Any, *others: Any, **named: Any) -> Any:
        known[next(iter(tasks))] = statistics
        return solve(tasks, modules, weights, statistics, *others, **named)

    def begun(job: Any, index: int, states: Any) -> Any:
        rows[:] = [ids for ids, _ in job.batches[:-1]] or rows
        return run(job, index, states)

    monkeypatch.setattr(block, "solve_layers", noted)
    monkeypatch.setattr(block_pass, "solve_layers", noted)
    monkeypatch.setattr(block_pass, "run_block", begun)
    return known, rows


def quantize(method: str = "gptq", **fields: Any) -> dict[str, Any]:
    return {"quantize": {"method": method, "bits": 3, "group_size": 32, "objective": "propagated", **fields}}


@torch.no_grad()
def read_by(model: Any, rows: list[torch.Tensor], name: str) -> torch.Tensor:
    """What layer `name` reads for all rows, `[tokens, in]`."""
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _m, args: seen.append(args[0].flatten(0, -2)))
    for ids in rows:
        model(ids)
    hook.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("embeddings", [False, True])
def test_drift_is_that_of_the_finished_model(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, watched: Any, embeddings: bool
) -> None:
    """All that is before the last layer is as the artifact has it, so the drift can be had from the two finished models."""
    stages = [quantize()]
    if embeddings:
        stages.append({"quantize": {"method": "rtn", "bits": 4, "group_size": 32, "targets": ["model.embed_tokens"]}})
    source = make_checkpoint(dtype=torch.float32, tie_word_embeddings=False)
    compress.apply(
        recipe(source, *stages, calibration=recipe(source)["calibration"] | ROWS), output=tmp_path / "out", quiet=True
    )
    known, rows = watched
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, tmp_path / "out")
    )
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.2.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        o, x = (read_by(model, rows, name).double() for model in (before, after))
        drift, expected = known[name].drift, x.T @ (o - x) / len(x)
        if name.startswith("model.layers.0") and not embeddings:
            assert not drift.any()
            assert not expected.any()
        else:
            assert relative(drift, expected) < 1e-3


def lost(source: Path, output: Path, rows: torch.Tensor) -> float:
    """Squared difference of logits, of their size."""
    before, after = (runtime.load(path, kernels="reference", dtype="float32").logits(rows) for path in (source, output))
    return float((before - after).square().sum() / before.square().sum())


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    "stages",
    [
        [quantize()],
        [quantize("rtn", bits=4)],
        [quantize("awq", bits=4)],
        [{"prune": {"method": "sparsegpt", "pattern": "2:4"}}, quantize(bits=4)],
        [{"prune": {"method": "wanda", "sparsity": 0.3}}, quantize("awq", bits=4)],
        [
            quantize("smoothquant", scheme="W8A8-INT8", bits=None, group_size=None),
            quantize(targets=["*.down_proj"], bits=2),
        ],
        [quantize(scheme="NVFP4A16", bits=None, group_size=None)],
    ],
    ids=["gptq", "rtn", "awq", "joint", "wanda and awq", "smoothquant", "nvfp4"],
)
def test_outputs_are_nearer_to_the_original_model(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, watched: Any, stages: Any
) -> None:
    source = make_checkpoint(dtype=torch.float32)
    errors = {}
    for objective in ("propagated", "layer"):  # the latter may read no text
        own = [
            {
                kind: {**fields, "objective": objective} if kind == "quantize" else fields
                for kind, fields in stage.items()
            }
            for stage in stages
        ]
        request = recipe(source, *own, calibration=recipe(source)["calibration"] | ROWS | {"samples": 64})
        compress.apply(request, output=tmp_path / objective, quiet=True)
        errors[objective] = lost(source, tmp_path / objective, torch.cat(watched[1])[:32])
    assert errors["propagated"] < 0.99 * errors["layer"], errors


def test_head_and_mixture(make_checkpoint: Any, recipe: Any, tmp_path: Path, watched: Any) -> None:
    """The head's weights are moved too; those of routed experts are not: other tokens may be routed to them."""
    source = make_checkpoint("mixtral", dtype=torch.float32)
    artifact = compress.apply(recipe(source, quantize(ignore=[])), output=tmp_path / "out", quiet=True)
    known, _ = watched
    assert (
        sum("layers of routed experts are fitted to their own outputs" in warning for warning in artifact.warnings) == 1
    )
    noted = {layer["name"] for layer in artifact.manifest["layers"] if "propagated" in layer["notes"]}
    assert {layer["method"] for layer in artifact.manifest["layers"]} == {"gptq int3 g32 propagated"}
    assert noted == {layer["name"] for layer in artifact.manifest["layers"] if ".experts." not in layer["name"]}
    experts = {name: statistics for name, statistics in known.items() if ".experts." in name}
    assert experts
    assert all(statistics.drift is None for statistics in experts.values())
    assert "lm_head" in known
    assert all(statistics.drift is not None for name, statistics in known.items() if name not in experts)


def test_starved_experts_are_rounded_to_nearest(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint("mixtral")
    calibration = recipe(source)["calibration"] | {"experts": {"at_least": 10**6, "starved": "nearest"}}
    artifact = compress.apply(recipe(source, quantize(), calibration=calibration), output=tmp_path / "out", quiet=True)
    assert any("rounded to nearest" in warning for warning in artifact.warnings)


@pytest.mark.parametrize("spill", [False, True])
def test_an_interrupted_run_ends_with_the_same_bytes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill: bool
) -> None:
    if spill:
        from compress.run import plan

        monkeypatch.setattr(plan, "SPILL_SHARE", -1.0)
    request = recipe(make_checkpoint(), quantize())
    compress.apply(request, output=tmp_path / "straight", quiet=True)
    run = block_pass.run_block

    def fail(job: Any, index: int, states: Any) -> Any:
        if index == 2:
            raise CompressError("stopped")
        return run(job, index, states)

    monkeypatch.setattr(block_pass, "run_block", fail)
    with pytest.raises(CompressError, match="stopped"):
        compress.apply(request, output=tmp_path / "resumed", quiet=True)
    monkeypatch.setattr(block_pass, "run_block", run)
    compress.apply(request, output=tmp_path / "resumed", quiet=True, resume=True)
    same_bytes(tmp_path / "straight", tmp_path / "resumed")


def test_too_little_text_is_said(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint()
    calibration = recipe(source)["calibration"] | {"samples": 2, "sequence_length": 16}
    plan = compress.plan(recipe(source, quantize(), calibration=calibration), output=tmp_path / "out")
    assert any("32 tokens of calibration text tell nothing of layers" in warning for warning in plan.warnings)
    with pytest.raises(RequestError, match="reads no hidden states: its objective must be layer"):
        compress.plan(recipe(source, quantize("rtn", targets=["model.embed_tokens"])), output=tmp_path / "out")


def test_the_plan_counts_the_second_model(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint()
    alone, both = (
        compress.plan(recipe(source, quantize(objective=objective)), output=tmp_path / "out")
        for objective in ("layer", "propagated")
    )
    assert both.memory["blocks"] > alone.memory["blocks"]
    assert both.memory["hidden states"] == 2 * alone.memory["hidden states"]
    assert both.seconds > alone.seconds
