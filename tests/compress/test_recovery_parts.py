"""What recovery trains through: masks, grids, low-rank changes; what it compares; and teachers whose outputs are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import random_llama
from torch import nn

from compress.distill.recovery.constraints import Adapter, between_codes, constrain, settle
from compress.distill.recovery.held import Held, load, save
from compress.distill.recovery.layers import followed
from compress.distill.recovery.losses import squarehead
from compress.distill.recovery.teachers import Cached, InMemory, cache_outputs
from compress.distill.rows import Batch
from compress.pipeline.stream import StreamedModel
from compress.quantize.grid import make_grid
from runtime.checkpoint import Checkpoint
from runtime.errors import ArtifactError, CompressError
from runtime.scheme import Scheme, WeightScheme

INT3 = Scheme(weights=WeightScheme(3, group_size=8))
ASYMMETRIC = Scheme(weights=WeightScheme(4, symmetric=False, group_size=8), sparsity="unstructured")


def layers(out: int = 6, columns: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, out, bias=False), nn.Linear(out, out, bias=False))


def on_grid(weight: torch.Tensor, scheme: Scheme, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, Held]:
    assert scheme.weights is not None
    grid = make_grid(weight, scheme.weights, torch.float32, "minmax", mask=mask)
    values = grid.values(grid.codes(weight))
    return (values if mask is None else values * mask), Held(mask, scheme, grid.scale, grid.zero)


def train(module: nn.Module, steps: int = 30, rate: float = 0.05) -> None:
    x, y = torch.randn(64, 16), torch.randn(64, 6)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=rate, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (module(x) - y).square().mean().backward()
        optimizer.step()


def test_removed_weights_stay_zero_whatever_trains_them() -> None:
    for adapter, targets in ((None, frozenset()), (Adapter(2, 1.0), frozenset({"0", "1"}))):
        module = layers()
        mask = torch.rand(6, 16) > 0.5
        module[0].weight.data *= mask
        before = [layer.weight.detach().clone() for layer in module]
        for parameter in module.parameters():
            parameter.requires_grad_(adapter is None)
        constrain(module, {"0": Held(mask)}, adapter, targets)
        train(module)
        settle(module)
        assert torch.equal(module[0].weight != 0, mask)
        assert not torch.allclose(module[0].weight, before[0])
        assert not torch.allclose(module[1].weight, before[1])
        assert [name for name, _ in module.named_parameters()] == ["0.weight", "1.weight"]
        if adapter is not None:
            change = torch.linalg.matrix_rank(module[1].weight.detach() - before[1], atol=1e-5)
            assert int(change) <= 2


@pytest.mark.parametrize("scheme", [INT3, ASYMMETRIC])
def test_quantized_weights_move_from_code_to_code(scheme: Scheme) -> None:
    module = layers()
    mask = torch.rand(6, 16) > 0.5 if scheme.sparsity else None
    values, held = on_grid(module[0].weight.detach(), scheme, mask)
    module[0].weight.data = values.clone()
    constrain(module, {"0": held})
    assert torch.equal(module[0].weight, values), "training begins at the quantized weight"
    train(module)
    settle(module)
    weight, grid = module[0].weight.detach(), held.grid
    assert grid is not None
    assert torch.equal(grid.values(grid.codes(weight.clone())) * (1 if mask is None else mask), weight)
    assert float((weight != values).float().mean()) > 0.1
    low, high = scheme.weights.code_range  # type: ignore[union-attr]
    assert low <= float(grid.codes(weight.clone()).min()) <= float(grid.codes(weight.clone()).max()) <= high


@pytest.mark.parametrize("scheme", [INT3, ASYMMETRIC])
def test_training_begins_where_a_weight_was_rounded_from(scheme: Scheme) -> None:
    source = torch.randn(6, 16)
    weight, held = on_grid(source, scheme)
    grid = held.grid
    assert grid is not None
    source[0, 0] += 100 * float(grid.scale.abs().max())
    found = between_codes(weight, source, grid)
    assert torch.equal(grid.values(grid.codes(found.clone())), weight)
    assert float(found[0, 0]) == float(weight[0, 0])
    distance = [(values - source).abs()[1:].mean() for values in (found, weight)]
    assert float(distance[0]) < 0.3 * float(distance[1])


def test_what_is_beyond_the_grid_comes_back_and_goes_no_further() -> None:
    module = nn.Linear(8, 1, bias=False)
    module.weight.data = torch.linspace(-1, 1, 8)[None]
    _, held = on_grid(module.weight.detach(), Scheme(weights=WeightScheme(3, group_size=8)))
    module.weight.data[0, 0], module.weight.data[0, 7] = -9.0, 9.0
    holder = nn.ModuleDict({"layer": module})
    constrain(holder, {"layer": held})
    original = module.parametrizations.weight.original  # type: ignore[union-attr, operator]
    gradients = []
    for sign in (1.0, -1.0):
        (gradient,) = torch.autograd.grad(sign * module.weight.sum(), [original])
        gradients.append(gradient[0])
    # A step goes against the gradient: +1 lowers, -1 raises.
    assert [float(g[0]) for g in gradients] == [0.0, -1.0]
    assert [float(g[7]) for g in gradients] == [1.0, 0.0]
    assert bool((gradients[0][1:7] == 1).all())


def test_what_is_held_is_kept_on_disk(tmp_path: Path) -> None:
    mask = torch.rand(5, 13) > 0.4
    _, held = on_grid(torch.randn(6, 16), ASYMMETRIC, torch.rand(6, 16) > 0.5)
    given = {"a.b": Held(mask, Scheme(sparsity="2:4")), "c": held, "d": on_grid(torch.randn(6, 16), INT3)[1]}
    save(tmp_path / "held.safetensors", given)
    found = load(tmp_path / "held.safetensors")
    assert found.keys() == given.keys()
    for name, own in given.items():
        assert found[name].scheme == own.scheme
        for part in ("mask", "scale", "zero"):
            one, other = getattr(own, part), getattr(found[name], part)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    (tmp_path / "held.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArtifactError, match="damaged"):
        load(tmp_path / "held.safetensors")


def test_squarehead_is_the_share_of_what_is_missing() -> None:
    theirs = [torch.randn(4, 5, 7), 100 * torch.randn(4, 5, 7)]
    ours = [0.9 * theirs[0], 0.7 * theirs[1]]
    assert float(squarehead(ours, theirs)) == pytest.approx((0.1**2 + 0.3**2) / 2, rel=1e-4)
    ours[0] = ours[0] + 0.5 * torch.randn(4, 5, 7)
    parts = [
        squarehead([own[rows] for own in ours], [own[rows] for own in theirs]) for rows in (slice(0, 1), slice(1, 4))
    ]
    assert float(squarehead(ours, theirs)) == pytest.approx(float((parts[0] + 3 * parts[1]) / 4), rel=1e-5)


def test_layers_answer_to_those_that_they_were() -> None:
    assert followed([5], []) == [0, 1, 2, 3, 4]
    cut = {"remove": "layers", "kept": [[0, 2, 3, 4]]}
    again = {"remove": "layers", "kept": [[0, 1, 3]]}
    assert followed([5], [cut, {"remove": "ffn"}, again]) == [0, 2, 4]
    assert followed([3, 4], [{"remove": "layers", "kept": [[0, 2], [0, 3]]}]) == [0, 2, 3, 6]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: Any) -> StreamedModel:
    path = tmp_path_factory.mktemp("model")
    random_llama(num_hidden_layers=3).save_pretrained(path)
    return StreamedModel(Checkpoint(path))


def test_a_kept_teacher_says_what_one_in_memory_says(streamed: StreamedModel, tmp_path: Path) -> None:
    ids = torch.randint(1, 257, (7, 12))
    kept = cache_outputs(streamed, ids, [0, 2], tmp_path / "kept", top=257, temperature=1.0)
    live = InMemory(streamed, [0, 2], torch.device("cpu"))
    chosen = torch.tensor([6, 0, 3])
    batch = Batch(ids[chosen], torch.ones(3, 12, dtype=torch.bool), chosen, torch.zeros(3, dtype=torch.int64))
    one, other = live.outputs(batch), kept.outputs(batch)
    for mine, theirs in zip(one.states, other.states, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert isinstance(one.logits, torch.Tensor)
    said = torch.log_softmax(one.logits, -1).gather(-1, other.logits.ids)  # type: ignore[union-attr]
    torch.testing.assert_close(said, other.logits.log_probs, rtol=1e-2, atol=1e-2)  # type: ignore[union-attr]
    later = Cached(tmp_path / "kept", first=4)
    shifted = Batch(ids[4:6], batch.trained[:2], torch.tensor([0, 1]), batch.seeds[:2])
    torch.testing.assert_close(later.outputs(shifted).states[0], live.outputs(shifted).states[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(CompressError, match="row 8 is not among the 7"):
        later.outputs(Batch(ids[:1], batch.trained[:1], torch.tensor([4]), batch.seeds[:1]))


def test_a_teacher_is_not_asked_twice(streamed: StreamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(1, 257, (3, 8))
    kept = cache_outputs(streamed, ids, [1], tmp_path / "kept", top=4, temperature=1.0)
    before = {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir() if file.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(StreamedModel, "run_block", lambda *_: pytest.fail("asked again"))
        assert cache_outputs(streamed, ids, [1], tmp_path / "kept", top=4, temperature=1.0).facts == kept.facts
    cache_outputs(streamed, ids, [1], tmp_path / "kept", top=5, temperature=1.0)
    after = {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir() if file.is_file()}
    assert after["manifest.json"] != before["manifest.json"]
    assert not [name for name in after if name.startswith("block-")]


def test_a_disk_that_is_too_small_is_noticed_before(
    streamed: StreamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.distill.recovery.teachers.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CompressError, match="teacher: memory"):
        cache_outputs(streamed, torch.randint(1, 257, (3, 8)), [1], tmp_path / "kept", top=4, temperature=1.0)
