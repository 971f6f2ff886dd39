"""Drafts that begin as a smaller checkpoint and not as a part of the artifact."""

from __future__ import annotations

import json

import pytest
import yaml
from draft_stages import RTN, draft

import compress
import runtime
from compress.recipe import load
from compress.run.session import Session
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError

NARROW = {"name": "small", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [draft(), draft("s2d"), draft("pard")], ids=["distillspec", "s2d", "pard"])
def test_a_checkpoint_becomes_the_draft(make_checkpoint, recipe, tmp_path, stage):
    small = make_checkpoint(**NARROW)
    del stage["draft"]["layers"]
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(make_checkpoint(), RTN, {"draft": {**stage["draft"], "model": "small"}})))
    done = compress.apply(file, output=tmp_path / "out", quiet=True)
    facts = done.manifest["draft"]["facts"]
    assert facts["model"] == {"name": "small", "fingerprint": Checkpoint(small).fingerprint()}
    assert "layers" not in facts
    config = json.loads((done.path / "draft/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 2)
    model, without = (runtime.load(done.path, device="cpu", drafter=drafter) for drafter in (None, False))
    texts = [[5, 6, 7, 8], [9, 10] * 8]
    assert model.generate(texts, max_new_tokens=20, ignore_eos=True) == without.generate(
        texts, max_new_tokens=20, ignore_eos=True
    )
    assert model.stats["drafted_tokens"] > 0
    again = next(s for s in load(done.path / "recipe.yaml").stages if s.kind == "draft")
    assert (again.config.model, again.config.layers) == ("small", None)


def test_it_decides_which_draft_comes_out(make_checkpoint, recipe, tmp_path):
    small = make_checkpoint(**NARROW)
    stages = load(recipe(make_checkpoint(), RTN, draft(layers=None, model=str(small))))
    (first,) = [job.identity for job in Session.open(stages, "cpu").after]
    make_checkpoint(**NARROW, initializer_range=0.3, rms_norm_eps=1e-3)
    (second,) = [job.identity for job in Session.open(stages, "cpu").after]
    assert {key for key in first if first[key] != second[key]} == {"model"}


@pytest.mark.parametrize(
    ("changes", "stage", "said"),
    [
        ({}, draft(), "layers: the draft is all of small; leave layers, or model, out"),
        (
            {"vocab_size": 300},
            draft(layers=None),
            "model: the draft's model has 300 tokens and its target 257; both must",
        ),
        ({"max_position_embeddings": 24}, draft(layers=None), "sequence_length: .* 24 positions of the draft's model"),
        (
            {"family": "opt", "word_embed_proj_dim": 32},
            draft("s2d", layers=None, depths=[3]),
            "depths: 1 to 2, the draft's",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    make_checkpoint, recipe, tmp_path, monkeypatch, changes, stage, said
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(**{**NARROW, **changes})
    stage["draft"]["model"] = "small"
    with pytest.raises(RequestError, match=f"stages.1.draft.{said}"):
        compress.plan(recipe(make_checkpoint(), RTN, stage))


def test_its_tokens_must_mean_the_same(make_checkpoint, recipe, tmp_path):
    small = make_checkpoint(**NARROW)
    file = small / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        RequestError, match=r"draft.model: .*small has another vocabulary than .*model .*'[ab]' with id"
    ):
        compress.plan(recipe(make_checkpoint(), RTN, draft(layers=None, model=str(small))))


def test_where_it_cannot_be_is_said(make_checkpoint, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(**NARROW)
    model = make_checkpoint()
    with pytest.raises(
        RequestError, match=r"recipe: stages.1.draft.model: no directory './smal'; did you mean 'small'"
    ):
        compress.plan(recipe(model, RTN, draft(layers=None, model="./smal")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"stages.1.draft.model: .*empty"):
        compress.plan(recipe(model, RTN, draft(layers=None, model="empty")))
    with pytest.raises(RequestError, match=r"stages.1.draft.layers: .*1 to 3"):
        compress.plan(recipe(model, RTN, {"draft": {**draft()["draft"], "layers": None}}))


@pytest.mark.slow
def test_the_class_of_the_draft_may_be_another(make_checkpoint, recipe, tmp_path):
    small = make_checkpoint("opt", name="small")
    stages = recipe(make_checkpoint(), RTN, draft(layers=None, model=str(small), quantize="none"))
    done = compress.apply(stages, output=tmp_path / "out", quiet=True)
    assert json.loads((done.path / "draft/config.json").read_text())["model_type"] == "opt"
    assert runtime.load(done.path, device="cpu").stats["drafter"].startswith("chain")
