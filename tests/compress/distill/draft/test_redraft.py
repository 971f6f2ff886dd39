"""`compress draft`: a finished artifact gets a draft, or another one, from one process or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from draft_stages import RTN, draft, files
from warm_python import torchrun

import compress
import runtime
from compress.cli import main
from compress.distill.draft import redraft
from compress.distill.train import loop
from runtime.checkpoint.artifact import Artifact
from runtime.errors import CompressError, RequestError

TEXTS = [[5, 6, 7, 8], [9, 10] * 8]


@pytest.fixture
def plain(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> Path:
    """An artifact without a draft."""
    return compress.apply(recipe(make_checkpoint(), RTN), output=tmp_path / "plain", quiet=True).path


def drafts(path: Path) -> list[str]:
    return sorted(f.name for f in path.iterdir() if "draft" in f.name or f.name == ".compress")


@pytest.mark.slow
def test_a_finished_artifact_gets_the_draft_that_apply_would_have_made(plain, recipe, tmp_path):
    stages = recipe(tmp_path / "model", RTN, draft())
    made = compress.draft(plain, stages, device="cpu", quiet=True)
    manifest = Artifact(plain).manifest
    assert manifest["draft"] == made
    assert Artifact(plain).verify() == len(manifest["files"])
    assert "<h2>Draft</h2>" in (plain / "report.html").read_text(encoding="utf-8")
    assert "It includes a draft" in (plain / "README.md").read_text(encoding="utf-8")
    assert drafts(plain) == ["draft"]
    straight = compress.apply(stages, output=tmp_path / "straight", quiet=True, device="cpu")
    assert straight.manifest["draft"] == made
    assert files(plain / "draft") == files(straight.path / "draft")
    model, without = (runtime.load(plain, device="cpu", drafter=drafter) for drafter in (None, False))
    assert model.stats["drafter"].startswith("chain")
    texts = [each.generate(TEXTS, max_new_tokens=20, ignore_eos=True) for each in (model, without)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_old_draft_is_valid_until_the_manifest_names_the_new_one(plain, recipe, tmp_path, monkeypatch):
    first, second = (recipe(tmp_path / "model", draft(quantize="none", seed=seed)) for seed in (0, 1))
    compress.draft(plain, first, quiet=True)
    (plain / "drafter.json").write_text('{"drafter": "lookup"}')
    before = files(plain)

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(redraft, "exchange_draft", stopped)
        with pytest.raises(KeyboardInterrupt):
            compress.draft(plain, second, quiet=True)
    assert {name: content for name, content in files(plain).items() if name in before} == before
    Artifact(plain).verify()
    assert runtime.load(plain, device="cpu", drafter=True).speculation is not None

    with monkeypatch.context() as patched:
        patched.setattr(redraft, "write_sealed", stopped)
        with pytest.raises(KeyboardInterrupt):
            compress.draft(plain, second, quiet=True)
    Artifact(plain).verify()
    assert runtime.load(plain, device="cpu").stats["drafter"].startswith("chain")

    made = compress.draft(plain, second, quiet=True)
    assert made["drafter"] == {"model": "draft-2"}
    assert drafts(plain) == ["draft-2"]
    Artifact(plain).verify()
    assert runtime.load(plain, device="cpu").stats["drafter"].startswith("chain")
    assert compress.draft(plain, first, quiet=True)["drafter"] == {"model": "draft"}
    assert drafts(plain) == ["draft"]
    assert files(plain) == {name: content for name, content in before.items() if name != "drafter.json"}


def test_a_draft_that_is_there_is_not_made_again_and_training_goes_on(plain, recipe, tmp_path, monkeypatch):
    stages, steps = recipe(tmp_path / "model", draft(quantize="none", steps=4, evaluate_every=1)), []
    own = loop.Training.update

    def counted(self: Any, step: int) -> float:
        steps.append(step)
        if steps == [0, 1, 2]:
            raise CompressError("the power is gone")
        return own(self, step)

    monkeypatch.setattr(loop.Training, "update", counted)
    before = files(plain)
    with pytest.raises(CompressError, match="the power is gone"):
        compress.draft(plain, stages, quiet=True)
    assert before.items() <= files(plain).items()
    made = compress.draft(plain, stages, quiet=True)
    assert steps == [0, 1, 2, 2, 3]
    assert compress.draft(plain, stages, quiet=True) == made
    assert len(steps) == 5


def test_a_draft_without_a_directory_takes_the_old_one_away(plain, recipe, tmp_path, capsys):
    compress.draft(plain, recipe(tmp_path / "model", draft(quantize="none")), quiet=True)
    skip = draft("skip", trials=4, samples=3, sequence_length=32, places=2, tokens=2)
    made = compress.draft(plain, recipe(tmp_path / "model", skip), device="cpu", quiet=True)
    assert made["drafter"]["method"] == "skip"
    assert drafts(plain) == []
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tmp_path / "model", skip)))
    assert main(["draft", str(plain), str(file), "--device", "cpu", "--quiet"]) == 0
    assert "draft (skip)" in capsys.readouterr().out
    assert Artifact(plain).manifest["draft"] == made
    Artifact(plain).verify()


def test_what_cannot_be_done_is_said(plain, recipe, tmp_path, monkeypatch, capsys):
    stages = recipe(tmp_path / "model", draft())
    with pytest.raises(RequestError, match=r"compress.json"):
        compress.draft(tmp_path / "model", stages)
    with pytest.raises(RequestError, match="directory"):
        compress.draft(tmp_path / "nowhere", stages)
    with pytest.raises(RequestError, match=r"stages: .*draft"):
        compress.draft(plain, recipe(tmp_path / "model", RTN))
    with pytest.raises(RequestError, match=r"stages.0.draft.layers: .* 1 to 3"):
        compress.draft(plain, recipe(tmp_path / "model", draft(layers=4)))
    team = redraft.Team()
    team.size = 3
    monkeypatch.setattr(redraft.Team, "join", lambda device: team)
    with pytest.raises(RequestError, match=r"draft.batch_size: 4 .*3 processes"):
        compress.draft(plain, stages)
    with pytest.raises(RequestError, match=r"draft.method: skip .*3 processes"):
        compress.draft(plain, recipe(tmp_path / "model", draft("skip", sequence_length=32)))
    (plain / "compress.json").unlink()
    (plain / ".compress").mkdir()
    (plain / ".compress/run.json").write_text("{}")
    with pytest.raises(RequestError, match=r"`compress apply`.*--resume"):
        compress.draft(plain, stages)


def test_several_processes_have_the_gpus_that_their_launcher_gives_them(plain, recipe, tmp_path, monkeypatch, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tmp_path / "model", RTN, draft())))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["draft", str(plain), str(file), "--device", "cuda:1"]) == 2
    assert "each of 2 processes has its launcher's GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_make_the_draft_of_one(plain, recipe, tmp_path):
    """Started as a launcher does; all is written once, by one of them."""
    file = tmp_path / "recipe.yaml"
    stage = draft(data="teacher", quantize="none", vocabulary=100, teacher_top=4)
    file.write_text(yaml.safe_dump(recipe(tmp_path / "model", RTN, stage)))
    alone = compress.apply(file, output=tmp_path / "alone", device="cpu", quiet=True).manifest["draft"]
    command = ["-m", "compress.cli", "draft", plain, file, "--device", "cpu", "--quiet", "--json"]
    done = torchrun(2, *command, warm=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)["draft"]
    Artifact(plain).verify()
    assert drafts(plain) == ["draft"]
    assert made["identity"] == alone["identity"]
    curves = [each["facts"]["training"]["curve"]["held_out"] for each in (made, alone)]
    for a, b in zip(*curves, strict=True):
        assert a == pytest.approx(b, abs=1e-3)
    assert runtime.load(plain, device="cpu").stats["drafter"].startswith("chain")
