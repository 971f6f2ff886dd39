"""Rotations that are learned: orthogonal, better on inputs that were not shown, and folded like any other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import UNLIMITED
from test_rotate_stage import applied, interrupt, logits, record, source

import compress
from compress.prune.structure.hidden_norms import Norm
from compress.rotate import METHODS, hidden_matrix, keep_mean, spinquant
from compress.rotate.method import Site
from compress.rotate.rotation import HiddenRotation
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError
from runtime.formats.activation_scheme import ActivationScheme
from runtime.kernels.activations import fake_quantize

SPINQUANT = {"rotate": {"method": "spinquant", "steps": 24}}


def drawn(size: int, seed: int = 0) -> list[Site]:
    """Inputs with a few heavy directions, and what reads them."""
    draw = torch.Generator().manual_seed(seed)
    sites = []
    for _ in range(3):
        basis = torch.linalg.qr(torch.randn(size, size, generator=draw))[0]
        spread = torch.ones(size)
        spread[: max(1, size // 8)] = 20
        inputs = torch.randn(400, size, generator=draw) * spread @ basis
        sites.append(Site(inputs, torch.randn(32, size, generator=draw)))
    return sites


def lost(sites: list[Site], matrix: torch.Tensor, bits: int = 4) -> float:
    """Relative squared error of the outputs, step by step."""
    found = 0.0
    for site in sites:
        turned = site.inputs @ matrix.float()
        rounded = fake_quantize(turned, ActivationScheme(bits=bits), {})
        outputs, wanted = (rounded @ matrix.float().T) @ site.rows.T, site.inputs @ site.rows.T
        found += float((outputs - wanted).square().sum() / wanted.square().sum())
    return found / len(sites)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("size", [16, 52])
def test_learned_matrices_are_orthogonal_and_lose_less(size: int, mean: bool) -> None:
    start = spinquant.matrix(size, torch.Generator().manual_seed(0))
    start = keep_mean(start) if mean else start
    sites = drawn(size)
    found = spinquant.learn(start, sites, spinquant.SpinQuantConfig(steps=80))
    assert found.dtype == torch.float64
    assert torch.allclose(found @ found.T, torch.eye(size, dtype=torch.float64), atol=1e-9)
    ones = torch.ones(size, dtype=torch.float64)
    assert torch.allclose(ones @ found, ones, atol=1e-12) == mean
    fresh = torch.Generator().manual_seed(9)
    unseen = [
        Site(
            torch.randn(300, size, generator=fresh) @ torch.linalg.cholesky(one.inputs.T @ one.inputs / 400).T, one.rows
        )
        for one in sites
    ]
    assert lost(unseen, found) < 0.8 * lost(unseen, start)


@pytest.mark.parametrize("angle", [0.2, 0.35, -0.3])
def test_two_dimensions_come_near_the_best_angle(angle: float) -> None:
    """Corners of a square that is turned, and noise; every rotation of the plane is tried."""

    def turned(angle: float) -> torch.Tensor:
        rows = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        return torch.tensor(rows, dtype=torch.float64)

    draw = torch.Generator().manual_seed(4)
    corners = 2.0 * torch.randint(0, 2, (2000, 2), generator=draw) - 1 + 0.05 * torch.randn(2000, 2, generator=draw)
    inputs = corners @ turned(angle).float()
    site = Site(inputs, torch.randn(8, 2, generator=draw))
    losses = [lost([site], turned(step * math.pi / 360)) for step in range(180)]
    start = turned(0.01)  # no angle of zero: that would keep the mean
    found = spinquant.learn(start, [site], spinquant.SpinQuantConfig(steps=200))
    least, most = min(losses), lost([site], start)
    assert most > 1.2 * least
    assert lost([site], found) < least + 0.2 * (most - least)


def test_values_of_several_heads_are_rotated_by_one_matrix() -> None:
    """Inputs are three pieces long; what was not shown loses less, too."""
    sites = [Site(site.inputs, site.rows) for site in drawn(48)[:1]]
    start = spinquant.matrix(16, torch.Generator().manual_seed(0))
    found = spinquant.learn(start, sites, spinquant.SpinQuantConfig(steps=80))
    whole = [torch.block_diag(matrix, matrix, matrix) for matrix in (start, found)]
    held = [Site(site.inputs[::4], site.rows) for site in sites]
    assert lost(held, whole[1]) < 0.95 * lost(held, whole[0])


@pytest.mark.parametrize(("centred", "offset"), [(False, 0.0), (False, 1.0), (True, 0.0)])
def test_what_norms_give_without_their_weights(centred: bool, offset: float) -> None:
    """A bias is divided by the weights, as where it is folded."""
    draw = torch.Generator().manual_seed(2)
    weight, bias, x = (
        torch.rand(8, generator=draw) + 0.5,
        torch.randn(8, generator=draw),
        torch.randn(5, 8, generator=draw) + 1,
    )
    tensors = {"n.weight": weight - offset} | ({"n.bias": bias} if centred else {})
    hidden = HiddenRotation(torch.eye(8), [], {"n": Norm("n", offset, centred)}, tensors.get)
    norm = torch.nn.LayerNorm(8, eps=0.0) if centred else torch.nn.RMSNorm(8, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(weight)
        if centred:
            norm.bias.copy_(bias)
        assert torch.allclose(hidden.given("n", x) * hidden.gain("n"), norm(x), atol=1e-5)


def test_where_no_step_helps_the_matrix_stays() -> None:
    """Inputs of zeros lose nothing; one alone leaves none to judge by."""
    start = spinquant.matrix(8, torch.Generator().manual_seed(0))
    for inputs in (torch.zeros(9, 8), torch.ones(1, 8)):
        found = spinquant.learn(start, [Site(inputs, torch.ones(2, 8))], spinquant.SpinQuantConfig(steps=8))
        assert torch.equal(found, start)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "olmo", "starcoder2", "qwen3_next"])
def test_a_rotated_model_computes_what_it_did(name: str, tiny_text: Path, tmp_path: Path) -> None:
    model = source(name, tmp_path / "source")
    text = {"data": str(tiny_text), "sequence_length": 32, "samples": 8}
    made = applied(model, tmp_path / "out", SPINQUANT, calibration=text).path
    assert float((logits(made) - logits(model)).norm() / logits(model).norm()) < 1e-5
    assert record(made)["matrix"]["size"]


def test_an_interrupted_run_gives_the_same_bytes(
    tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix is learned once."""
    text = {"data": str(tiny_text), "sequence_length": 32, "samples": 8}
    recipe = {"name": "rotated", "model": str(tiny_llama()), "stages": [SPINQUANT], "calibration": text}
    whole = compress.apply(recipe, output=tmp_path / "whole", quiet=True).path
    interrupt(recipe, tmp_path / "resumed", monkeypatch)

    def learn_values(start: torch.Tensor, sites: list[Site], config: Any) -> torch.Tensor:
        assert len(start) == 16, "the matrix of the hidden state is there"
        return spinquant.learn(start, sites, config)

    monkeypatch.setitem(METHODS, "spinquant", replace(METHODS["spinquant"], learn=learn_values))
    resumed = compress.apply(recipe, output=tmp_path / "resumed", resume=True, quiet=True).path
    files = [{file.name: file.read_bytes() for file in path.glob("*.safetensors")} for path in (whole, resumed)]
    assert files[0] == files[1] != {}


def test_values_alone_are_learned_where_the_hidden_state_stays(tiny_text: Path, tmp_path: Path) -> None:
    """Post-norms do not fold."""
    model = source("gemma2", tmp_path / "source")
    text = {"data": str(tiny_text), "sequence_length": 32, "samples": 8}
    stages = [{"rotate": {"method": method, "hidden": False}} for method in ("hadamard", "spinquant")]
    made = [applied(model, tmp_path / str(index), stage, calibration=text).path for index, stage in enumerate(stages)]
    for path in made:
        assert float((logits(path) - logits(model)).norm() / logits(model).norm()) < 1e-5
        assert record(path)["values"] == 2
    values = [Checkpoint(path).get("model.layers.0.self_attn.v_proj.weight") for path in made]
    assert not torch.equal(*values)


@pytest.mark.parametrize("name", ["llama", "mixtral", "olmo"])
def test_every_norm_is_a_site(name: str, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that routed experts in one tensor read, too, and those without weights."""
    seen: list[int] = []

    def learn(start: torch.Tensor, sites: list[Site], _config: Any) -> torch.Tensor:
        seen.append(len(sites))
        assert all(len(site.inputs) > 8 and len(site.rows) > 8 for site in sites)
        return start

    monkeypatch.setitem(METHODS, "spinquant", replace(METHODS["spinquant"], learn=learn))
    text = {"data": str(tiny_text), "sequence_length": 32, "samples": 8}
    applied(source(name, tmp_path / "source"), tmp_path / "out", SPINQUANT, calibration=text)
    assert seen == [4, 1, 1]  # two norms of two blocks; then the values of each block


def test_inputs_of_4_bits_lose_less_than_with_a_random_matrix(
    tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    quantize = {"quantize": {"method": "rtn", "bits": 8, "group_size": 32, "activations": "int4"}}
    settings = {
        "calibration": {"data": str(tiny_text), "sequence_length": 64, "samples": 16},
        "evaluate": {**UNLIMITED, "data": "bundled", "samples": 8, "sequence_length": 64},
    }
    kl = [
        applied(tiny_llama(), tmp_path / method, {"rotate": {"method": method}}, quantize, **settings).metrics["kl"]
        for method in ("hadamard", "spinquant")
    ]
    assert kl[1] < kl[0]


def test_what_needs_the_matrix_later_is_refused_before_the_run(
    tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    recover = {"recover": {"method": "finetune", "steps": 1, "samples": 8, "batch_size": 2}}
    text = {"data": str(tiny_text), "sequence_length": 32, "samples": 8}
    with pytest.raises(
        RequestError, match=r"stages.1.recover: .* rotation by spinquant is not kept; rotate by hadamard"
    ):
        applied(tiny_llama(), tmp_path / "out", SPINQUANT, recover, calibration=text)
    with pytest.raises(CompressError, match="kept nowhere but in the weights"):
        hidden_matrix("spinquant", {"size": 64, "seed": 0, "keeps_mean": False})
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_what_learning_takes(tiny_llama: Callable[..., Path], tiny_text: Path) -> None:
    text = {"data": str(tiny_text), "sequence_length": 32, "samples": 8}
    plans = [
        compress.plan(
            {"name": "x", "model": str(tiny_llama()), "calibration": text, "stages": [{"rotate": {"method": method}}]}
        )
        for method in ("hadamard", "spinquant")
    ]
    assert plans[1].peak_memory > plans[0].peak_memory + 2**25
    assert plans[1].seconds > plans[0].seconds
