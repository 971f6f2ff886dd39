"""Recipes with a draft stage, from the file to texts that the artifact writes with its draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import TIMED

import compress
import runtime
from compress.cli import main
from compress.distill.draft import METHODS
from compress.recipe import load
from runtime.checkpoint.artifact import Artifact
from runtime.errors import RequestError
from runtime.system.self_hash import sealed_json

RTN = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}
SHORT = {
    "layers": 1,
    "samples": 16,
    "sequence_length": 32,
    "steps": 6,
    "batch_size": 4,
    "evaluate_every": 3,
    "tokens": 3,
    "data": "given",
}


WITHOUT = {
    "medusa": ["layers"],
    "mtp": ["layers"],
    "kangaroo": ["layers"],
    "skip": [*SHORT],
}  # fields that a method does not have


def draft(method: str = "distillspec", **changes: Any) -> dict[str, Any]:
    fields = {key: value for key, value in SHORT.items() if key not in WITHOUT.get(method, ())}
    return {"draft": {"method": method, **fields, **changes}}


def files(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name not in TIMED}


@pytest.fixture
def plain(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> Any:
    return compress.apply(recipe(make_checkpoint(), RTN, draft()), output=tmp_path / "plain", quiet=True)


def test_an_artifact_brings_its_draft_and_decodes_with_it(plain):
    manifest = plain.manifest["draft"]
    assert manifest["drafter"] == {"model": "draft"}
    held = plain.manifest["bytes"]
    assert held["total"] == held["after"] + held["draft"] > held["after"]
    facts = manifest["facts"]
    assert set(facts["after"]) >= {"held_out", "text", "code", "chat"}
    assert facts["layers"] == [0]
    assert 0 < facts["cost"]["of_target"] < 1
    assert len(facts["training"]["curve"]["held_out"]) == 3
    assert "draft/draft.json" in plain.manifest["files"]
    assert Artifact(plain.path).verify() == len(plain.manifest["files"])
    page = (plain.path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Draft</h2>" in page
    assert "same token when greedy" in page
    model = runtime.load(plain.path, device="cpu")
    assert model.stats["drafter"].startswith("chain")
    texts = [[5, 6, 7, 8], [9, 10] * 8]
    without = runtime.load(plain.path, device="cpu", drafter=False)
    assert model.generate(texts, max_new_tokens=40, ignore_eos=True) == without.generate(
        texts, max_new_tokens=40, ignore_eos=True
    )
    fixed = runtime.load(
        plain.path, device="cpu", drafter={"model": str(plain.path / "draft"), "lengths": "fixed", "depth": 3}
    )
    assert fixed.generate(texts, max_new_tokens=40, ignore_eos=True) == without.generate(
        texts, max_new_tokens=40, ignore_eos=True
    )
    assert fixed.stats["drafted_tokens"] > 0


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_bytes(plain, make_checkpoint, recipe, tmp_path):
    again = compress.apply(recipe(tmp_path / "model", RTN, draft()), output=tmp_path / "again", quiet=True)
    assert files(again.path) == files(plain.path)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_an_interrupted_training_goes_on(plain, recipe, tmp_path, monkeypatch, step):
    from compress.distill.train import loop

    stages = recipe(tmp_path / "model", RTN, draft())
    own, done = loop.Training.update, []

    def failing(self, number):
        if number == step and not done:
            done.append(number)
            raise KeyboardInterrupt
        return own(self, number)

    monkeypatch.setattr(loop.Training, "update", failing)
    with pytest.raises(KeyboardInterrupt):
        compress.apply(stages, output=tmp_path / "again", quiet=True)
    assert not (tmp_path / "again" / "compress.json").exists()
    found = compress.apply(stages, output=tmp_path / "again", resume=True, quiet=True)
    assert files(found.path) == files(plain.path)


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("distillspec", {"data": "mixed", "divergence": "tvd", "quantize": "none"}),
        ("distillspec", {"data": "teacher", "teacher_top": 8, "vocabulary": 100}),
        ("distillspec", {"layers": [0, 2], "data": "on_policy", "quantize": "W4A16"}),
        ("distillspec", {"accept_head": True}),
        ("s2d", {"layers": 2}),
        ("s2d", {"layers": 3, "depths": [1]}),
        ("pard", {"data": "given"}),
        ("medusa", {"vocabulary": 100}),
        ("mtp", {}),
        ("kangaroo", {"exit_layer": 1}),
        ("skip", {"trials": 6, "samples": 3, "sequence_length": 32, "places": 2, "tokens": 2}),
    ],
)
def test_every_way_to_make_a_draft_ends_in_one_that_runs(make_checkpoint, recipe, tmp_path, method, changes):
    done = compress.apply(recipe(make_checkpoint(), RTN, draft(method, **changes)), output=tmp_path / "out", quiet=True)
    model = runtime.load(done.path, device="cpu")
    without = runtime.load(done.path, device="cpu", drafter=False)
    texts = [[5, 6, 7, 8], [9, 10] * 8]
    assert model.generate(texts, max_new_tokens=30, ignore_eos=True) == without.generate(
        texts, max_new_tokens=30, ignore_eos=True
    )
    assert model.stats["drafted_tokens"] > 0
    page = (done.path / "report.html").read_text(encoding="utf-8")
    kinds = done.manifest["draft"]["facts"]["after"]
    assert set(kinds) >= {"held_out", "text", "code", "chat"}
    lines = len(kinds) * (1 if method == "skip" else 2)  # drafts that skip are counted greedily
    assert page.count("<td>before</td>") == page.count("<td>after</td>") == lines
    if "vocabulary" in changes:
        assert done.manifest["draft"]["facts"]["vocabulary"]["tokens"] == 100


def test_a_recipe_of_a_draft_alone_copies_the_weights(make_checkpoint, recipe, tmp_path):
    done = compress.apply(recipe(make_checkpoint(), draft()), output=tmp_path / "out", quiet=True)
    assert {entry["action"] for entry in done.manifest["tensors"].values()} == {"copied"}
    assert done.manifest["draft"]["method"] == "distillspec"


def test_overwriting_removes_an_earlier_draft(plain, recipe, tmp_path):
    done = compress.apply(recipe(tmp_path / "model", RTN), output=plain.path, overwrite=True, quiet=True)
    assert not (done.path / "draft").exists()
    assert "draft" not in done.manifest


def test_a_draft_that_was_changed_is_found(plain):
    file = next((plain.path / "draft").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RequestError, match="draft/"):
        runtime.load(plain.path)


def test_a_draft_of_another_artifact_is_refused(plain, make_checkpoint, recipe, tmp_path):
    other = compress.apply(
        recipe(make_checkpoint(name="other", initializer_range=0.3), RTN), output=tmp_path / "second", quiet=True
    )
    with pytest.raises(RequestError, match="another target"):
        runtime.load(other.path, drafter=str(plain.path / "draft"))
    shutil.copytree(plain.path / "draft", other.path / "draft")
    manifest = json.loads((other.path / "compress.json").read_text())
    (other.path / "compress.json").write_text(
        sealed_json({**manifest, "draft": {"drafter": {"model": "../plain/draft"}}})
    )
    with pytest.raises(RequestError, match="inside the artifact"):
        runtime.load(other.path)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (draft(layers=4), "draft.layers: .* 1 to 3"),
        (draft(layers=[0, 3]), r"draft.layers: .* \[0, 3\]"),
        (
            draft("kangaroo", exit_layer=3),
            "the model has 3 layers; the draft must leave it before the last, not after 3",
        ),
        (draft(vocabulary=300), "the model has 257 tokens; the draft cannot keep 300"),
        (draft(sequence_length=256), "rows of 256 tokens are more than the 128 positions of the model"),
        (draft(divergence="kl"), "draft.divergence"),
        (draft("distilspec"), "did you mean 'distillspec'"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_done(make_checkpoint, recipe, tmp_path, stage, said):
    with pytest.raises(RequestError, match=said):
        compress.apply(recipe(make_checkpoint(), RTN, stage), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_two_drafts_are_one_too_many(make_checkpoint, recipe, tmp_path):
    with pytest.raises(RequestError, match="one draft"):
        load(recipe(make_checkpoint(), draft(), draft("pard")))


def test_methods_are_listed_with_their_papers(capsys):
    assert main(["methods", "show", "pard"]) == 0
    assert "2504.18583" in capsys.readouterr().out
    assert set(METHODS) == {"distillspec", "s2d", "pard", "medusa", "mtp", "kangaroo", "skip"}


@pytest.mark.slow
def test_bench_compares_drafters_and_keeps_the_best(plain, capsys, tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("def f(x):\n    return x\n" * 40)
    arguments = [
        "bench",
        str(plain.path),
        "--drafters",
        "--text",
        str(text),
        "-n",
        "8",
        "--repeat",
        "1",
        "--json",
        "--device",
        "cpu",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    names = [entry["name"] for entry in found["drafters"]]
    assert {"lookup", "suffix", "own", "own, as a tree", "early-exit", "lookup, then own"} <= set(names)
    assert [entry["overall"] for entry in found["drafters"]] == sorted(
        (e["overall"] for e in found["drafters"]), reverse=True
    )
    chosen = json.loads((plain.path / "drafter.json").read_text())
    assert chosen["drafter"] == found["drafter"]
    model = runtime.load(plain.path, device="cpu")
    assert (model.speculation is None) == (found["best"] == "none")
    assert main(["bench", str(plain.path), "--drafters", "--reference", "x"]) == 2
