"""The stage `recover`: what earlier stages have settled stays, quality comes back, and later stages build on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from encoder_models import bert, save, t5
from random_models import UNLIMITED
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.models.llama.modeling_llama import LlamaMLP
from warm_python import torchrun

import compress
import runtime
from compress.core.tensors import relative
from compress.distill.recover import recovery
from compress.distill.train import loop
from compress.distill.train.data import split_rows
from compress.model.context import Context
from compress.recipe import load as load_recipe
from compress.run.plan import make_plan
from compress.weights import block_pass
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError
from runtime.layers.compressed_linear import CompressedLinear

BUNDLED = Path(__file__).resolve().parents[4] / "recipes" / "checkpoints" / "stdlib-4m"
SPARSE = {"prune": {"method": "sparsegpt", "sparsity": 0.6}}
GRID = {"quantize": {"method": "gptq", "bits": 2, "group_size": 64}}


def recover(method: str = "finetune", **fields: Any) -> dict[str, Any]:
    small = {"samples": 24, "sequence_length": 32, "steps": 6, "batch_size": 4, "evaluate_every": 3}
    return {"recover": {"method": method, **small, **fields}}


def bundled(*stages: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "test",
        "model": str(BUNDLED),
        "calibration": {"samples": 32, "sequence_length": 64},
        "stages": list(stages),
        "evaluate": {**UNLIMITED, "sequence_length": 64, "samples": 24},
    }


SHORTER = {"samples": 64, "sequence_length": 64, "steps": 8, "batch_size": 8, "evaluate_every": 4}
LONGER = {"samples": 160, "sequence_length": 64, "steps": 16, "batch_size": 8, "evaluate_every": 8}


def weights(path: Path) -> dict[str, torch.Tensor]:
    module = runtime.load(path, kernels="reference").engine.module
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, CompressedLinear):
            found[name] = layer.dequantize()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "method", "fields", "share"),
    [
        (SPARSE, "lora", {"rank": 16, "learning_rate": 3e-3}, 0.95),
        (GRID, "finetune", {"learning_rate": 1e-3, "steps": 40, "samples": 400, "evaluate_every": 20}, 0.85),
    ],
)
def test_some_of_what_was_lost_comes_back_soon(
    tmp_path: Path, before: dict[str, Any], method: str, fields: dict[str, Any], share: float
) -> None:
    lost = compress.apply(bundled(before), output=tmp_path / "lost", quiet=True)
    stage = recover(method, **{**LONGER, **fields})
    won = compress.apply(bundled(before, stage), output=tmp_path / "won", quiet=True)
    assert won.metrics["perplexity_increase"] < share * lost.metrics["perplexity_increase"]
    (facts,) = won.manifest["passes"]
    assert facts["recover"] == method
    assert facts["perplexity_after"] < facts["perplexity_before"]
    assert facts["after"]["loss"] < facts["before"]["loss"]
    # What was lost before the training stands beside it; what was trained is stored as it is.
    assert {line["name"]: line["error"] for line in facts["compressed"]} == {
        line["name"]: pytest.approx(line["error"]) for line in lost.manifest["layers"]
    }
    assert all(line["error"] is None for line in won.manifest["layers"])
    page = (tmp_path / "won/report.html").read_text()
    assert "had been moved by what was compressed before this training" in page
    assert "Error of every layer" not in page
    one, other = weights(tmp_path / "lost"), weights(tmp_path / "won")
    assert one.keys() == other.keys()
    changed = [float((one[name] != other[name]).float().mean()) for name in one]
    assert sum(change > 0.001 for change in changed) > len(changed) / 2
    if before is SPARSE:
        # What was removed stays removed; now and then a weight that was left is trained to zero.
        assert all(not bool((other[name][one[name] == 0] != 0).any()) for name in one)
        assert won.manifest["layers"][0]["sparsity"] == pytest.approx(0.6, abs=0.01)
    else:
        assert won.manifest["bytes"]["after"] == lost.manifest["bytes"]["after"]
        assert [layer["bits"] for layer in won.manifest["layers"]] == [
            layer["bits"] for layer in lost.manifest["layers"]
        ]


@pytest.mark.slow
def test_the_whole_chain(tmp_path: Path) -> None:
    stages = (
        {"structure": {"method": "obs", "remove": "ffn", "keep": 640}},
        recover(**SHORTER, learning_rate=3e-4),
        {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
        recover(**SHORTER, learning_rate=3e-4, teacher="cached"),
        {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 128}},
        {
            "draft": {
                "method": "distillspec",
                "layers": 1,
                "samples": 16,
                "sequence_length": 32,
                "steps": 4,
                "data": "given",
            }
        },
    )
    recipe = bundled(*stages)
    plan = make_plan(load_recipe(recipe), tmp_path / "out")
    assert len(plan.passes) == 3
    made = compress.apply(recipe, output=tmp_path / "out", quiet=True)
    assert [facts.get("remove") or facts.get("recover") for facts in made.manifest["passes"]] == [
        "ffn",
        "finetune",
        "finetune",
    ]
    assert made.metrics["perplexity_increase"] < 0.6
    for name, weight in weights(tmp_path / "out").items():
        assert int((weight.view(len(weight), -1, 4) != 0).sum(-1).max()) <= 2, name
    layers = {layer["name"]: layer["method"] for layer in made.manifest["layers"]}
    assert all("2:4" in method and "gptq" in method for method in layers.values())
    assert made.manifest["draft"]["method"] == "distillspec"
    assert runtime.load(tmp_path / "out").generate("import os", max_new_tokens=8)


def states(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """After each layer, the hidden states of a model, or of its decoder: `[layers + 1, b, s, hidden]`."""
    module = runtime.load(path, kernels="reference").engine.module
    decoder = {"decoder_input_ids": ids} if module.config.is_encoder_decoder else {}
    with torch.no_grad():
        found = module(input_ids=ids, output_hidden_states=True, **decoder)
    return torch.stack(found.decoder_hidden_states if decoder else found.hidden_states).float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "teacher", "shares"),
    [
        ("encoder", "memory", (0.85, 0.4)),
        ("encoder", "cached", (0.85, 0.4)),
        ("encoder-decoder", "cached", (0.96, 0.9)),  # it learns more of what is said than of the states
    ],
)
def test_other_kinds_of_models(
    recipe: Any, tmp_path: Path, kind: str, teacher: str, shares: tuple[float, float]
) -> None:
    model = bert() if kind == "encoder" else t5(tie_word_embeddings=False)
    source = save(model, tmp_path / "model")
    before = (
        {"structure": {"method": "magnitude", "keep": 64, "reconstruct": False}},
        {"prune": {"method": "wanda", "sparsity": 0.5}},
    )
    compress.apply(recipe(source, *before), output=tmp_path / "lost", quiet=True)
    stage = recover(steps=40, samples=160, learning_rate=1e-3, evaluate_every=10, teacher=teacher)
    request = recipe(source, *before, stage)
    made = compress.apply(request, output=tmp_path / "won", quiet=True)
    facts = made.manifest["passes"][1]
    assert facts["after"]["loss"] < facts["before"]["loss"]
    assert ("kl" in facts["after"]) == (kind == "encoder-decoder")
    assert all(layer["sparsity"] == pytest.approx(0.5, abs=0.02) for layer in made.manifest["layers"])
    # On rows that it was not trained on it is nearer to the whole model after every layer.
    loaded = load_recipe(request)
    ids, _ = recovery.rows(Context.open(loaded, Checkpoint(source), "cpu"), loaded.stages[-1])
    _, ids = split_rows(ids)
    whole, lost, won = (states(tmp_path / name, ids)[1:] for name in ("model", "lost", "won"))
    apart = [((own - whole).square().sum((2, 3)) / whole.square().sum((2, 3))).mean(1) for own in (lost, won)]
    assert bool((apart[1] < torch.tensor(shares) * apart[0]).all()), apart
    if (
        kind == "encoder"
    ):  # what it was trained for is what came of it; the output is the last state, and counts by itself
        for when, own in zip(("before", "after"), apart, strict=True):
            assert facts[when]["loss"] == pytest.approx(float(own[[0, 1, 1]].mean()), rel=1e-3)
    one, other = weights(tmp_path / "lost"), weights(tmp_path / "won")
    assert one.keys() == other.keys()
    assert {64} == {size for weight in other.values() for size in weight.shape}, "96 channels were cut to 64"
    for name, weight in other.items():
        assert weight.shape == one[name].shape
        assert not bool(weight[one[name] == 0].any()), name
        assert not torch.equal(weight, one[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 5])
def test_a_run_that_was_stopped_goes_on_with_the_same_bytes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    request = recipe(make_checkpoint(), {"prune": {"method": "sparsegpt", "sparsity": 0.5}}, recover(evaluate_every=2))
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    real = loop.Training.update

    def step(self: Any, number: int) -> float:
        if number == stop:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(loop.Training, "update", step)
    with pytest.raises(KeyboardInterrupt):
        compress.apply(request, output=tmp_path / "out", quiet=True)
    done = []
    monkeypatch.setattr(loop.Training, "update", lambda self, number: (done.append(number), real(self, number))[1])
    made = compress.apply(request, output=tmp_path / "out", resume=True, quiet=True)
    assert done[0] == stop // 2 * 2
    for file in straight.path.glob("*.safetensors"):
        assert file.read_bytes() == (made.path / file.name).read_bytes()
    assert json.loads((straight.path / "compress.json").read_text()) == json.loads(
        (made.path / "compress.json").read_text()
    )


@pytest.mark.slow
def test_passes_that_are_done_are_not_done_again(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (
        {"structure": {"method": "obs", "keep": 64}},
        recover(),
        {"prune": {"method": "wanda", "pattern": "2:4"}},
        recover(),
    )
    request = recipe(make_checkpoint(), *stages)
    straight = compress.apply(request, output=tmp_path / "straight", quiet=True)
    real, blocks_done = block_pass.run_block, []

    def one_block(job: Any, *rest: Any) -> Any:
        blocks_done.append(job.plan.constraints != {})
        if sum(blocks_done) == 2:  # in the last pass of all
            raise KeyboardInterrupt
        return real(job, *rest)

    monkeypatch.setattr(block_pass, "run_block", one_block)
    with pytest.raises(KeyboardInterrupt):
        compress.apply(request, output=tmp_path / "out", quiet=True)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "out/.compress").glob("pass-*")) == [
        "pass-00000.json", "pass-00001.json", "pass-00002", "pass-00002.json",
    ]  # fmt: skip
    monkeypatch.setattr(loop.Training, "update", lambda *_: pytest.fail("trained again"))
    made = compress.apply(request, output=tmp_path / "out", resume=True, quiet=True)
    assert json.loads((straight.path / "compress.json").read_text()) == json.loads(
        (made.path / "compress.json").read_text()
    )


@pytest.mark.parametrize("steps", [0, 1])
def test_nested_widths_with_activations_computed_again(steps: int) -> None:
    from compress.distill.recover.matformer import MatFormerConfig
    from compress.distill.recover.nested import Nested
    from compress.distill.recover.outputs import Outputs
    from compress.distill.recover.recovery import checkpoint_activations, whole
    from compress.distill.train.data import Batch
    from compress.model.streamed import StreamedModel

    streamed = StreamedModel(Checkpoint(BUNDLED))
    config = MatFormerConfig(kl=0.0, squarehead=0.0, cross_entropy=1.0, widths=[0.25, 1.0])
    seeds = torch.tensor([steps, steps])
    ids = torch.randint(0, 4096, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones(2, 16, dtype=torch.bool), seeds, seeds)
    batch.trained[:, -1] = False
    gradients = []
    for again in (False, True):
        model, _ = whole(BUNDLED, torch.device("cpu"))
        model.requires_grad_(True)
        if again:
            checkpoint_activations(model)
        learner = Nested(model, streamed, config, [])
        learner.train()
        loss, _ = learner(batch, Outputs([], None))
        loss.backward()
        gradients.append(model.model.layers[1].mlp.down_proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)
    narrow = learner.width == 192
    assert bool((gradients[0][:, 192:] == 0).all()) == narrow


def test_the_text_alone_needs_no_teacher(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.distill.recover.teachers import InMemory

    monkeypatch.setattr(InMemory, "__init__", lambda *_: pytest.fail("a teacher was loaded"))
    stages = ({"prune": {"method": "wanda", "pattern": "2:4"}}, recover(kl=0.0, squarehead=0.0, cross_entropy=1.0))
    made = compress.apply(recipe(make_checkpoint(), *stages), output=tmp_path / "out", quiet=True)
    assert made.manifest["passes"][0]["after"].keys() == {"loss", "cross_entropy"}


def test_an_embedding_that_was_quantized_is_not_trained(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    quantize = {"method": "rtn", "bits": 8, "group_size": 32, "targets": ["Linear", "Embedding"]}
    with pytest.raises(RequestError, match=r"stages\.1\.recover: .*embed_tokens"):
        compress.apply(
            recipe(make_checkpoint(tie_word_embeddings=False), {"quantize": quantize}, recover()),
            output=tmp_path / "out",
            quiet=True,
        )


def test_a_head_that_shares_its_tensor_is_not_trained_apart(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    stages = (
        {"quantize": {"method": "rtn", "bits": 8, "group_size": 32, "targets": ["Linear", "lm_head"], "ignore": []}},
        recover(),
    )
    with pytest.raises(RequestError, match=r"stages\.1\.recover: .*embedding"):
        compress.apply(recipe(make_checkpoint(tie_word_embeddings=True), *stages), output=tmp_path / "out", quiet=True)


def test_a_loss_that_diverges_ends_with_the_best_weights(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = recipe(make_checkpoint(), {"prune": {"method": "magnitude", "sparsity": 0.5}}, recover(steps=9))
    real = loop.Training.update

    def step(self: Any, number: int) -> float:
        if number == 7:
            for weight in self.weights.values():
                weight.data.fill_(torch.nan)
        return real(self, number)

    monkeypatch.setattr(loop.Training, "update", step)
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    (facts,) = made.manifest["passes"]
    assert facts["ended"] == "diverged"
    assert 0 < facts["best_step"] <= 6
    assert any("diverged" in warning for warning in made.warnings)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights(made.path).values())


@dataclass
class Passes:
    """What training did: `count` passes through feed-forward networks, of `rows` each; `kinds` of numbers that linear layers gave."""

    count: int = 0
    rows: set[int] = field(default_factory=set)
    kinds: set[torch.dtype] = field(default_factory=set)


@contextmanager
def watched() -> Iterator[Passes]:
    """Counts what has gradients: neither the teacher nor what is measured has. Hooks see a block once even where it is computed again,
    but what is in it twice; and it may not end a second time, when all that the backward pass needs is there."""
    found = Passes()

    def begin(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, LlamaMLP) and torch.is_grad_enabled():
            found.count += 1
            found.rows.add(len(args[0]))

    def end(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Linear) and torch.is_grad_enabled():
            found.kinds.add(output.dtype)

    handles = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.slow
def test_precision_and_memory_do_not_change_what_is_learned(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    request = {"prune": {"method": "magnitude", "sparsity": 0.5}}
    losses, once = {}, 3 * 6  # blocks and steps
    for name, fields, count, rows, kind in (
        ("plain", {}, once, 4, torch.float32),
        ("checkpointed", {"gradient_checkpointing": True}, 2 * once, 4, torch.float32),
        ("parts", {"micro_batch": 2}, 2 * once, 2, torch.float32),
        ("both", {"micro_batch": 2, "gradient_checkpointing": True}, 4 * once, 2, torch.float32),
        ("bf16", {"precision": "bfloat16"}, once, 4, torch.bfloat16),
    ):
        stages = (request, recover(**{"precision": "float32", "learning_rate": 1e-3, **fields}))
        with watched() as found:
            made = compress.apply(recipe(make_checkpoint(), *stages), output=tmp_path / name, quiet=True)
        assert found == Passes(count, {rows}, {kind}), name
        (facts,) = made.manifest["passes"]
        losses[name] = facts["after"]["loss"]
        assert losses[name] < 0.95 * facts["before"]["loss"], name
    assert losses["checkpointed"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["parts"] == pytest.approx(losses["plain"], rel=1e-2)
    assert losses["both"] == pytest.approx(losses["parts"], rel=1e-4)
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=5e-2)


SHARED = """
import os, sys, compress, torch
torch.set_num_threads(1)
made = compress.apply(sys.argv[1], output=sys.argv[2], quiet=True)  # where it computes is found out, as on the command line
print(made.path, len(made.manifest["passes"]))
threads = [open(f"/proc/self/task/{one}/comm").read() for one in os.listdir("/proc/self/task")]
assert not any("gloo" in name for name in threads), "connections stay open, whose threads can abort this process as it ends"
"""


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    stages = (
        {"prune": {"method": "wanda", "pattern": "2:4"}},
        recover(micro_batch=1, learning_rate=1e-3),
        recover("lora", rank=4),
    )
    request = recipe(make_checkpoint(dtype=torch.float32), *stages)
    alone = compress.apply(request, output=tmp_path / "alone", device="cpu", quiet=True)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(request))
    (tmp_path / "program.py").write_text(SHARED)
    done = torchrun(2, tmp_path / "program.py", tmp_path / "recipe.yaml", tmp_path / "both", warm=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(str(tmp_path / "both")) == 2, "each process has the artifact"
    manifest = json.loads((tmp_path / "both/compress.json").read_text())
    for one, other in zip(alone.manifest["passes"], manifest["passes"], strict=True):
        for mine, theirs in zip(one["curve"]["held_out"], other["curve"]["held_out"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-5)
    mine, theirs = weights(tmp_path / "alone"), weights(tmp_path / "both")
    for name, weight in mine.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-2, atol=1e-3)
        assert torch.equal(theirs[name] == 0, weight == 0)


@pytest.mark.slow
def test_a_run_that_fails_in_one_process_ends_in_all(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    request = recipe(make_checkpoint(), {"prune": {"method": "wanda", "pattern": "2:4"}}, recover())
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(request))
    (tmp_path / "program.py").write_text(SHARED)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("not yours")
    done = torchrun(2, tmp_path / "program.py", tmp_path / "recipe.yaml", tmp_path / "out")
    assert done.returncode != 0
    assert "already holds mine.txt" in done.stderr
    assert "failed in the main process" in done.stderr or "SIGTERM" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([recover(kl=0.0, squarehead=0.0)], ["recover", "nothing to learn"]),
        ([recover()], ["recover.method", "nothing to teach", "structure, prune, quantize"]),
        ([recover(), {"prune": {"method": "wanda", "sparsity": 0.5}}], ["recover.method", "nothing to teach"]),
        ([recover(learning_rate=0.0)], ["recover.learning_rate", "above 0"]),
        ([SPARSE, recover("lora", rank=65)], ["recover.rank", "hidden size 64"]),
        ([recover("finetun")], ["recover.method", "did you mean", "finetune"]),
        ([SPARSE, recover(sequence_length=100_000)], ["recover.sequence_length"]),
        ([recover(data="x.txt")], ["unknown key", "data"]),
    ],
)
def test_what_cannot_be_is_refused(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, stages: Any, words: list[str]
) -> None:
    with pytest.raises((RequestError, CompressError)) as error:
        compress.apply(recipe(make_checkpoint(), *stages), output=tmp_path / "out", quiet=True)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert error.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_an_encoder_has_no_next_token_to_learn(recipe: Any, tmp_path: Path) -> None:
    source = save(bert(), tmp_path / "model")
    for fields in ({"kl": 1.0}, {"squarehead": 0.0}):
        with pytest.raises(RequestError, match=r"recover\.(kl|squarehead)"):
            compress.apply(recipe(source, recover(**fields)), output=tmp_path / "out", quiet=True)


def test_the_recipe_of_an_encoder_runs_again(recipe: Any, tmp_path: Path) -> None:
    source = save(bert(), tmp_path / "model")
    stages = ({"prune": {"method": "magnitude", "sparsity": 0.5}}, recover(steps=2))
    made = compress.apply(recipe(source, *stages), output=tmp_path / "out", quiet=True)
    again = compress.apply(made.path / "recipe.yaml", output=tmp_path / "again", quiet=True)
    assert again.manifest["passes"] == made.manifest["passes"]


@pytest.mark.slow
def test_nested_widths_are_models_by_themselves(tmp_path: Path) -> None:
    nested = {**LONGER, "widths": ["25%", "50%", "100%"], "learning_rate": 1e-3, "steps": 32}
    made = compress.apply(bundled(recover("matformer", **nested)), output=tmp_path / "nested", quiet=True)
    (facts,) = made.manifest["passes"]
    widths = (192, 384, 768)
    assert all(facts["after"][f"loss_{width}"] < facts["before"][f"loss_{width}"] for width in widths[:2])
    assert made.metrics["perplexity_increase"] < 0.2
    increase = {}
    for source in (BUNDLED, tmp_path / "nested"):
        small = {**bundled({"structure": {"method": "prefix", "remove": "ffn", "keep": 384}}), "model": str(source)}
        cut = compress.apply(small, output=tmp_path / f"cut-{source.name}", quiet=True)
        increase[source.name] = cut.metrics["after"]["perplexity"]
    # Both were cut to the first half without any training after.
    assert increase["nested"] < 0.7 * increase["stdlib-4m"]
    ids = torch.randint(0, 4096, (1, 16))
    whole = runtime.load(tmp_path / "nested", kernels="reference").engine.module
    for layer in whole.model.layers:
        layer.mlp.down_proj.weight.data[:, 384:] = 0
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
    found = runtime.load(tmp_path / "cut-nested").logits(ids)
    assert relative(found, expected.float()) < 0.03  # rounding to bf16 in every operation


def test_channels_in_order_of_rank_compute_the_same(tmp_path: Path) -> None:
    from compress.distill.recover.nested import feed_forward, order
    from compress.distill.recover.recovery import whole
    from compress.model.streamed import StreamedModel

    streamed = StreamedModel(Checkpoint(BUNDLED))
    model, _ = whole(BUNDLED, torch.device("cpu"))
    ids = torch.randint(0, 4096, (4, 32))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        first = model.model.layers[0].mlp.up_proj.weight.clone()
        order(model, streamed, feed_forward(streamed), ids)
        after = model(input_ids=ids).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, first)
