"""What recovery trains through: masks, grids, low-rank changes; what it compares; and teachers whose outputs are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import random_llama
from torch import nn

from compress.core.progress import Reporter
from compress.distill.recover.alignment import Alignment
from compress.distill.recover.constraints import Adapter, between_codes, constrain, settle
from compress.distill.recover.finetune import FinetuneConfig
from compress.distill.recover.losses import Recovering, squarehead
from compress.distill.recover.teachers import Cached, InMemory, cache_outputs
from compress.distill.train.data import Batch, TextRows
from compress.model.streamed import StreamedModel
from compress.quantize.grid import make_grid
from compress.quantize.weight_constraint import WeightConstraint, load_constraints, save_constraints
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError, CompressError
from runtime.formats.scheme import GridScheme, Scheme

INT3 = Scheme(weights=GridScheme(3, group_size=8))
ASYMMETRIC = Scheme(weights=GridScheme(4, symmetric=False, group_size=8), sparsity="unstructured")


def layers(out: int = 6, columns: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, out, bias=False), nn.Linear(out, out, bias=False))


def on_grid(
    weight: torch.Tensor, scheme: Scheme, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, WeightConstraint]:
    assert scheme.weights is not None
    grid = make_grid(weight, scheme.weights, torch.float32, "minmax", mask=mask)
    values = grid.values(grid.codes(weight))
    return (values if mask is None else values * mask), WeightConstraint(mask, scheme, grid)


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
        constrain(module, {"0": WeightConstraint(mask)}, adapter, targets)
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
    _, held = on_grid(module.weight.detach(), Scheme(weights=GridScheme(3, group_size=8)))
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
    given = {
        "a.b": WeightConstraint(mask, Scheme(sparsity="2:4")),
        "c": held,
        "d": on_grid(torch.randn(6, 16), INT3)[1],
    }
    save_constraints(tmp_path / "held.safetensors", given)
    found = load_constraints(tmp_path)
    assert found.keys() == given.keys()
    for name, own in given.items():
        assert found[name].scheme == own.scheme
        assert (own.grid is None) == (found[name].grid is None)
        for part in ("mask", "scale", "zero"):
            one, other = (getattr(of if part == "mask" else of.grid, part, None) for of in (own, found[name]))
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    (tmp_path / "held.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArtifactError, match="held"):
        load_constraints(tmp_path)


def test_squarehead_is_the_share_of_what_is_missing() -> None:
    theirs = [torch.randn(4, 5, 7), 100 * torch.randn(4, 5, 7)]
    ours = [0.9 * theirs[0], 0.7 * theirs[1]]
    assert float(squarehead(ours, theirs)) == pytest.approx((0.1**2 + 0.3**2) / 2, rel=1e-4)
    ours[0] = ours[0] + 0.5 * torch.randn(4, 5, 7)
    parts = [
        squarehead([own[rows] for own in ours], [own[rows] for own in theirs]) for rows in (slice(0, 1), slice(1, 4))
    ]
    assert float(squarehead(ours, theirs)) == pytest.approx(float((parts[0] + 3 * parts[1]) / 4), rel=1e-5)


def test_what_is_left_answers_to_what_it_was() -> None:
    cut = {"remove": "layers", "kept": [[0, 2, 3, 4]]}
    again = {"remove": "layers", "kept": [[0, 1, 3]]}
    assert Alignment.of([5], [], None).layers == [0, 1, 2, 3, 4]
    assert Alignment.of([5], [cut, {"remove": "ffn"}, again], None).layers == [0, 2, 4]
    assert Alignment.of([3, 4], [{"remove": "layers", "kept": [[0, 2], [0, 3]]}], None).layers == [0, 2, 3, 6]
    narrow = [{"remove": "hidden", "dimensions": [1, 2, 5, 7]}, cut, {"remove": "hidden", "dimensions": [0, 3]}]
    found = Alignment.of([5], narrow, torch.tensor([4, 0, 2]))
    assert found.layers == [0, 2, 3, 4]
    given = torch.randn(2, 3, 8)
    assert torch.equal(found.states(given), given[..., [1, 7]])
    assert torch.equal(found.logits(given), given[..., [4, 0, 2]])
    assert found.asked(torch.tensor([[0, 2], [1, 1]])).tolist() == [[4, 2], [0, 0]]
    whole = Alignment.of([5], [cut], None)
    assert whole.states(given) is whole.logits(given) is whole.asked(given) is given
    assert found.facts != Alignment.of([5], narrow[:2], torch.tensor([4, 0, 2])).facts != whole.facts


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: Any) -> StreamedModel:
    path = tmp_path_factory.mktemp("model")
    random_llama(num_hidden_layers=3).save_pretrained(path)
    return StreamedModel(Checkpoint(path))


CUT = Alignment([0, 2], torch.tensor([3, 5, 60]), torch.randperm(257)[:200])


@pytest.mark.parametrize("alignment", [Alignment([0, 2]), CUT], ids=["whole", "cut"])
def test_a_kept_teacher_says_what_one_in_memory_says(
    streamed: StreamedModel, tmp_path: Path, alignment: Alignment
) -> None:
    tokens = 257 if alignment.tokens is None else len(alignment.tokens)
    ids = torch.randint(1, tokens, (7, 12))
    kept = cache_outputs(streamed, ids, alignment, tmp_path / "kept", 257, 1.0, Reporter(None, quiet=True))
    live = InMemory(streamed, alignment, torch.device("cpu"))
    chosen = torch.tensor([6, 0, 3])
    batch = Batch(ids[chosen], torch.ones(3, 12, dtype=torch.bool), chosen, torch.zeros(3, dtype=torch.int64))
    one, other = live.targets(batch), kept.targets(batch)
    if alignment is CUT:
        plain = InMemory(streamed, Alignment([0, 2]), torch.device("cpu"))
        whole = plain.targets(replace(batch, ids=CUT.tokens[batch.ids]))
        assert torch.equal(one.logits, whole.logits[..., CUT.tokens])
        assert all(torch.equal(a, b[..., [3, 5, 60]]) for a, b in zip(one.states, whole.states, strict=True))
    for mine, theirs in zip(one.states, other.states, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert isinstance(one.logits, torch.Tensor)
    said = torch.log_softmax(one.logits, -1).gather(-1, other.logits.ids)  # type: ignore[union-attr]
    torch.testing.assert_close(said, other.logits.log_probs, rtol=1e-2, atol=1e-2)  # type: ignore[union-attr]
    later = Cached(tmp_path / "kept", first=4)
    shifted = Batch(ids[4:6], batch.trained[:2], torch.tensor([0, 1]), batch.seeds[:2])
    torch.testing.assert_close(later.targets(shifted).states[0], live.targets(shifted).states[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(CompressError, match="row 8 "):
        later.targets(Batch(ids[:1], batch.trained[:1], torch.tensor([4]), batch.seeds[:1]))


@pytest.mark.parametrize("teacher", ["memory", "cached"])
@pytest.mark.parametrize(
    ("divergence", "temperature"), [("forward_kl", 1.0), ("forward_kl", 2.5), ("reverse_kl", 0.7), ("js", 1.0)]
)
def test_the_loss_is_the_sum_that_the_recipe_asks_for(
    streamed: StreamedModel, tmp_path: Path, divergence: str, temperature: float, teacher: str
) -> None:
    student, whole = random_llama(1, num_hidden_layers=3), random_llama(num_hidden_layers=3)  # that `streamed` is of
    weights = {"cross_entropy": 0.3, "kl": 0.5, "squarehead": 2.0}
    config = FinetuneConfig.model_validate({"divergence": divergence, "temperature": temperature, **weights})
    ids = torch.randint(1, 257, (4, 12))
    batch = TextRows(ids).batch([2, 0], [0, 0])
    alignment = Alignment([0, 1])
    asked = (
        InMemory(streamed, alignment, torch.device("cpu"))
        if teacher == "memory"
        else cache_outputs(streamed, ids, alignment, tmp_path / "kept", 257, temperature, Reporter(None, quiet=True))
    )
    learner = Recovering(student, streamed, config, [0, 1])
    found = learner.losses(batch, asked.targets(batch))
    with torch.no_grad():
        ours, theirs = (model(batch.ids, output_hidden_states=True) for model in (student, whole))
    q, p = (torch.log_softmax(one.logits[:, :-1].double() / temperature, -1) for one in (ours, theirs))
    m = ((p.exp() + q.exp()) / 2).log()
    parts = {
        "forward_kl": (p.exp() * (p - q)).sum(-1),
        "reverse_kl": (q.exp() * (q - p)).sum(-1),
        "js": ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2,
    }
    following = batch.ids[:, 1:, None]
    expected = {
        "kl": parts[divergence].mean(),
        "cross_entropy": -torch.log_softmax(ours.logits[:, :-1].double(), -1).gather(-1, following).mean(),
    }
    for place in (1, 2):  # after the first and the second layer
        own, other = (one.hidden_states[place].double() for one in (ours, theirs))
        share = (own - other).square().sum((1, 2)) / other.square().sum((1, 2))
        expected["squarehead"] = expected.get("squarehead", 0) + share.mean() / 2
    assert float(found["kl"]) == pytest.approx(float(expected["kl"]), rel=2e-2 if teacher == "cached" else 1e-3)
    assert float(found["squarehead"]) == pytest.approx(float(expected["squarehead"]), rel=1e-3)
    assert float(found["cross_entropy"]) == pytest.approx(float(expected["cross_entropy"]), rel=1e-3)
    assert float(found["loss"]) == pytest.approx(sum(weights[name] * float(found[name]) for name in weights), rel=1e-5)


def test_a_teacher_is_not_asked_twice(streamed: StreamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(1, 257, (3, 8))
    kept = cache_outputs(streamed, ids, Alignment([1]), tmp_path / "kept", 4, 1.0, Reporter(None, quiet=True))
    before = {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir() if file.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(StreamedModel, "run_block", lambda *_: pytest.fail("asked again"))
        assert (
            cache_outputs(streamed, ids, Alignment([1]), tmp_path / "kept", 4, 1.0, Reporter(None, quiet=True)).facts
            == kept.facts
        )
    cache_outputs(streamed, ids, Alignment([1]), tmp_path / "kept", 5, 1.0, Reporter(None, quiet=True))
    after = {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir() if file.is_file()}
    assert after["manifest.json"] != before["manifest.json"]
    assert not [name for name in after if name.startswith("block-")]


def test_a_disk_that_is_too_small_is_noticed_before(
    streamed: StreamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.distill.train.teacher_cache.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CompressError, match="teacher: memory"):
        cache_outputs(
            streamed,
            torch.randint(1, 257, (3, 8)),
            Alignment([1]),
            tmp_path / "kept",
            4,
            1.0,
            Reporter(None, quiet=True),
        )
