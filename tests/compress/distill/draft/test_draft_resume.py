"""A draft stage that failed is corrected without compressing again, and no run leaves a draft behind that is not its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draft_stages import RTN, draft, files

import compress
import runtime
from compress.distill.draft import training
from compress.distill.train import loop
from compress.run import run
from compress.weights import block_pass
from runtime.checkpoint.artifact import Artifact
from runtime.errors import CompressError, RequestError


@pytest.fixture
def failed(make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`failed(stage)`: the output of a run whose training diverged. From then on a block that is compressed is an error."""

    def make(stage: dict[str, Any]) -> Path:
        def diverges(self: Any, step: int) -> float:
            raise CompressError("training diverged: the loss of step 1 is nan; lower the learning rate")

        with monkeypatch.context() as patched:
            patched.setattr(loop.Training, "update", diverges)
            with pytest.raises(
                CompressError, match=r"diverged.* kept: change the recipe's draft section .* --resume"
            ) as said:
                compress.apply(recipe(make_checkpoint(), RTN, stage), output=tmp_path / "out", quiet=True)
        assert said.value.exit_code == 1
        assert not (tmp_path / "out/compress.json").exists()
        own = block_pass.run_block

        def of_the_draft(job: Any, *rest: Any) -> Any:
            assert job.plan.context.recipe.name == "draft", "a block was compressed again"
            return own(job, *rest)

        monkeypatch.setattr(block_pass, "run_block", of_the_draft)
        return tmp_path / "out"

    return make


@pytest.mark.slow
def test_a_corrected_draft_section_goes_on_after_the_compression(failed, recipe, tmp_path, monkeypatch):
    output = failed(draft())
    right = recipe(tmp_path / "model", RTN, draft(learning_rate=1e-4))
    found = compress.apply(right, output=output, resume=True, quiet=True)
    assert found.manifest["draft"]["stage"]["learning_rate"] == 1e-4
    monkeypatch.undo()
    assert files(found.path) == files(compress.apply(right, output=tmp_path / "straight", quiet=True).path)


def test_what_the_teacher_wrote_is_used_again(failed, recipe, tmp_path, monkeypatch):
    output = failed(draft(data="teacher", teacher_top=4))
    monkeypatch.setattr(training, "teacher_rows", lambda *a, **k: pytest.fail("the teacher wrote again"))
    stage = draft(data="teacher", teacher_top=4, learning_rate=1e-4, quantize="none")
    found = compress.apply(recipe(tmp_path / "model", RTN, stage), output=output, resume=True, quiet=True)
    assert found.manifest["draft"]["facts"]["training"]["steps"] == 2


def test_a_run_can_be_finished_without_its_draft(failed, recipe, tmp_path):
    output = failed(draft())
    (output / "draft").mkdir()
    (output / "draft/draft.json").write_text("{}")
    found = compress.apply(recipe(tmp_path / "model", RTN), output=output, resume=True, quiet=True)
    assert "draft" not in found.manifest
    assert not (output / "draft").exists()
    assert not any(name.startswith("draft") for name in found.manifest["files"])


def test_what_was_compressed_is_of_one_recipe_still(failed, recipe, tmp_path):
    output = failed(draft())
    other = {"quantize": {**RTN["quantize"], "bits": 8}}
    with pytest.raises(RequestError, match="another recipe"):
        compress.apply(recipe(tmp_path / "model", other, draft()), output=output, resume=True, quiet=True)


def test_a_draft_that_is_done_is_not_made_again_unless_it_is_another(make_checkpoint, recipe, tmp_path, monkeypatch):
    # Rounding a draft is a small run of its own, with a manifest.
    stages, output = recipe(make_checkpoint(), RTN, draft(quantize="none")), tmp_path / "out"
    other = recipe(tmp_path / "model", RTN, draft(quantize="none", seed=1))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "write_manifest", stopped)
        with pytest.raises(KeyboardInterrupt):
            compress.apply(stages, output=output, quiet=True)
        trained: list[int] = []
        own = loop.Training.run
        patched.setattr(loop.Training, "run", lambda self: trained.append(1) or own(self))
        with pytest.raises(KeyboardInterrupt):
            compress.apply(stages, output=output, resume=True, quiet=True)
        assert trained == []
        with pytest.raises(KeyboardInterrupt):
            compress.apply(other, output=output, resume=True, quiet=True)
        assert trained == [1]


def test_a_finished_artifact_with_another_draft_is_not_taken_for_the_one_asked_for(make_checkpoint, recipe, tmp_path):
    stages, output = recipe(make_checkpoint(), RTN, draft()), tmp_path / "out"
    made = compress.apply(stages, output=output, quiet=True)
    assert compress.apply(stages, output=output, resume=True, quiet=True).manifest == made.manifest
    with pytest.raises(RequestError, match=r"another draft.*`compress draft .* RECIPE`"):
        compress.apply(recipe(tmp_path / "model", RTN, draft(seed=1)), output=output, resume=True, quiet=True)
    with pytest.raises(RequestError, match="with a draft"):
        compress.apply(recipe(tmp_path / "model", RTN), output=output, resume=True, quiet=True)


# ---------------------------------------------------------------- what another run left
def test_overwriting_takes_the_choice_of_a_drafter_away(make_checkpoint, recipe, tmp_path):
    stages, output = recipe(make_checkpoint(), RTN), tmp_path / "out"
    compress.apply(stages, output=output, quiet=True)
    (output / "drafter.json").write_text('{"drafter": true}')
    done = compress.apply(stages, output=output, overwrite=True, quiet=True)
    assert not (output / "drafter.json").exists()
    assert runtime.load(done.path, device="cpu").speculation is None


@pytest.mark.parametrize("manifest", [True, False])
def test_overwriting_takes_a_draft_away_that_no_manifest_lists(make_checkpoint, recipe, tmp_path, manifest):
    stages, output = recipe(make_checkpoint(), RTN), tmp_path / "out"
    compress.apply(stages, output=output, quiet=True)
    if not manifest:
        (output / "compress.json").unlink()
        (output / ".compress").mkdir()
        (output / ".compress/run.json").write_text("{}")
    for name in ("draft/.compress", "draft-2", ".draft.tmp"):
        (output / name).mkdir(parents=True)
        (output / name / "draft.json").write_text("{}")
    done = compress.apply(stages, output=output, overwrite=True, quiet=True)
    assert not [f for f in output.iterdir() if "draft" in f.name]
    assert not [name for name in done.manifest["files"] if "draft" in name]


def test_the_choice_of_a_drafter_is_no_part_of_what_is_verified(make_checkpoint, recipe, tmp_path, monkeypatch):
    stages, output = recipe(make_checkpoint(), RTN), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(run, "write_manifest", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compress.apply(stages, output=output, quiet=True)
    (output / "drafter.json").write_text('{"drafter": "lookup"}')
    done = compress.apply(stages, output=output, resume=True, quiet=True)
    assert "drafter.json" not in done.manifest["files"]
    (output / "drafter.json").write_text(json.dumps({"drafter": "suffix"}))
    Artifact(output).verify()
