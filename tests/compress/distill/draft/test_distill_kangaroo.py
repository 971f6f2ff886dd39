"""Kangaroo adapters: what is trained of them, what is written, and that the runtime proposes what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distill_runs as runs
import pytest
import torch
from safetensors.torch import load_file

import runtime
from compress.core.files import sha256
from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.distill.draft.cut import cut
from compress.distill.draft.kangaroo import ADAPTER, METHOD, KangarooConfig, KangarooStudent
from compress.distill.draft.training import DraftTraining
from compress.distill.draft.write import write_tensors
from compress.distill.train.losses import Objective
from compress.distill.train.options import TrainOptions
from compress.distill.train.teacher import Teacher
from compress.model.stage import Store
from compress.run.run import apply_recipe
from runtime.drafting.config.build import Target, build
from runtime.drafting.config.request import parse
from runtime.drafting.drafters.base import Ask, Place
from runtime.engines.base import Chunk
from runtime.engines.native.take_over import take_over
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError
from runtime.kernels.cpu import library

needs_compiler = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")
ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {"input_layernorm.weight", "norm.weight"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")} | {"post_attention_layernorm.weight"}


def student(model: Any, layer: int = 1, **settings: Any) -> KangarooStudent:
    return KangarooStudent(cut(model, range(layer + 1)), **settings)


def test_only_the_adapter_is_trained() -> None:
    model = runs.target()
    for feed_forward, names in ((False, ATTENTION), (True, ATTENTION | MLP)):
        who = student(model, feed_forward=feed_forward)
        assert who.exit_layer == 1
        assert set(who.tensors()) == names
        before = {name: value.clone() for name, value in who.draft.state_dict().items()}
        options = TrainOptions(steps=3, batch=4, evaluate_every=3, learning_rate=1e-2)
        runs.run(who, model, options)
        trained = {name for name, value in who.named_parameters() if value.requires_grad}
        changed = {name for name, value in who.draft.state_dict().items() if not torch.equal(value, before[name])}
        assert trained == {f"draft.model.layers.1.{name}" for name in names - {"norm.weight"}} | {
            "draft.model.norm.weight"
        }
        assert changed <= {name.removeprefix("draft.") for name in trained}
        assert who.describe()["exit_layer"] == 1
        assert who.describe()["parameters"].keys() == trained


def test_what_it_computes() -> None:
    """With a feed-forward half and no training it is the target cut off; without one its last layer only attends."""
    model, ids = runs.target(), runs.rows(3).ids
    with torch.no_grad():
        whole = student(model, 2, feed_forward=True).logits(ids)
        torch.testing.assert_close(whole, model(input_ids=ids).logits)
        who = student(model, 1)
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[1]
        layer, rotary = model.model.layers[1], model.model.rotary_emb
        positions = torch.arange(ids.shape[1])[None]
        mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        attended, _ = layer.self_attn(
            layer.input_layernorm(hidden), position_embeddings=rotary(hidden, positions), attention_mask=mask
        )
        expected = model.lm_head(model.model.norm(hidden + attended))
        torch.testing.assert_close(who.logits(ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
def test_training_makes_it_agree_more(divergence: Any) -> None:
    model = runs.target()
    who = student(model, 1, objective=Objective(divergence))
    options = TrainOptions(steps=40, batch=16, evaluate_every=20, learning_rate=1e-2)
    found = runs.run(who, model, options, source=runs.rows(64, 12, seed=3))
    assert found.after["acceptance"] > found.before["acceptance"] + 0.05
    assert found.curve["train"][-1]["loss"] < found.curve["train"][0]["loss"]


# ---------------------------------------------------------------- what is written
def written(
    who: KangarooStudent, path: Path, target: str = "f", facts: Any = None, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """The directory of an adapter."""
    content = {"method": "kangaroo", "target": target, "facts": facts or {}, **who.content}
    write_tensors(path, ADAPTER, who.tensors(), content, dtype)
    return path


def test_what_is_written(tmp_path: Path) -> None:
    who = student(runs.target())
    path = written(who, tmp_path / "draft", "f" * 64, {"acceptance": 0.5})
    content = json.loads((path / "draft.json").read_text())
    assert {file.name for file in path.iterdir()} == {"draft.json", "adapter.safetensors"}
    file = path / "adapter.safetensors"
    assert content == {
        "schema_version": 1, "method": "kangaroo", "target": "f" * 64, "vocabulary": 61, "exit_layer": 1,
        "facts": {"acceptance": 0.5}, "files": {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}},
    }  # fmt: skip
    stored = load_file(file)
    assert stored.keys() == who.tensors().keys()
    for name, value in who.tensors().items():
        assert torch.equal(stored[name], value.bfloat16())
    written(who, path, "g")  # an earlier draft's is replaced
    assert json.loads((path / "draft.json").read_text())["target"] == "g"


def test_what_cannot_be_written_or_trained(tmp_path: Path) -> None:
    model = runs.target()
    who = student(model)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(RequestError, match="not empty"):
        written(who, tmp_path / "other")
    with pytest.raises(RequestError, match="fingerprint"):
        written(who, tmp_path / "draft", "")
    assert not (tmp_path / "draft").exists()


# ---------------------------------------------------------------- what the runtime makes of it
@needs_compiler
@pytest.mark.parametrize("feed_forward", [False, True])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_runtime_proposes_what_was_trained(tmp_path: Path, layer: int, feed_forward: bool) -> None:
    model = runs.target()
    who = student(model, layer, feed_forward=feed_forward)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in who.tensors().values():
            value += 0.1 * torch.randn(value.shape, generator=generator)
    path = written(who, tmp_path / "draft", dtype=torch.float32)
    engine = take_over(TorchEngine(model, torch.device("cpu")))
    assert engine is not None
    artifact: Any = SimpleNamespace(path=path, checkpoint=SimpleNamespace(fingerprint=lambda: "f"))
    drafter = build(parse({"model": str(path), "confidence": 0.0}), Target(artifact, engine))
    assert drafter.weights == sum(value.nbytes for value in who.tensors().values())
    for row in runs.rows(3, 40, seed=5).ids.tolist():
        pages = [0, 1]
        pool = engine.new_pages(2)
        engine.step(pool, [Chunk(row[:-1], 0, pages)])
        text = SimpleNamespace(tokens=row, prompt=40)
        ask = Ask(drafter.begin(text), text, 5, 5, place=Place(engine, pool, pages, 39, 25))
        (tree,) = drafter.draft([ask])
        assert len(tree) == 5
        for depth, (token, chance) in enumerate(zip(tree.tokens, tree.chances, strict=True)):
            with torch.no_grad():
                logits = who.logits(torch.tensor([row + tree.tokens[:depth]]))[0, -1]
            assert int(logits.argmax()) == token
            assert abs(float(torch.softmax(logits, -1).max()) - chance) < 1e-4


@needs_compiler
def test_made_for_an_artifact(tmp_path: Path) -> None:
    """The whole way: an artifact, the draft in it, texts that stay what they are."""
    runs.target(initializer_range=0.3).save_pretrained(tmp_path / "target")
    import compress

    recipe = tmp_path / "recipe.json"
    stages = [{"quantize": {"method": "rtn", "bits": 8, "group_size": 32}}]
    recipe.write_text(json.dumps({"name": "t", "model": str(tmp_path / "target"), "stages": stages}))
    artifact = Path(compress.apply(str(recipe), output=str(tmp_path / "out")).path)
    model = runtime.load(artifact)
    with Reporter(None, quiet=True) as reporter:
        making = DraftTraining(
            artifact=artifact, teacher=Teacher.of(model), rows=runs.rows(24, 24).ids, kinds={},
            store=Store(tmp_path / "draft", tmp_path / "work", RunDirectory(tmp_path), apply_recipe), reporter=reporter,
        )  # fmt: skip
        config = KangarooConfig(exit_layer=1, data="given", steps=4, batch_size=4, evaluate_every=2, tokens=3)
        settings = METHOD.make(making, config)
    assert settings == {"model": "draft"}
    content = json.loads((tmp_path / "draft" / "draft.json").read_text())
    assert content["facts"] == json.loads(json.dumps(making.facts))
    assert {"before", "after", "training", "cost", "worth", "exit_layer"} <= content["facts"].keys()
    assert 0 < content["facts"]["cost"]["of_target"] < 1
    drafter = build(parse({"model": str(tmp_path / "draft"), "confidence": 0.0}), Target(model.artifact, model.engine))
    from runtime.drafting.lengths.fixed import Fixed
    from runtime.drafting.speculation import Speculation

    prompts = runs.rows(4, 10, seed=8).ids.tolist()
    expected = model.generate(prompts, max_new_tokens=30)
    model.speculation = Speculation(drafter, lengths=Fixed(3, 3))
    assert model.generate(prompts, max_new_tokens=30) == expected
    assert model.stats["drafted_tokens"] > 0
