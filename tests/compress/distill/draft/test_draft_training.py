"""Measures of a draft in training: of the draft that is stored, before and after alike, wherever the target computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_stages import UNTRACKED
from teachers import acceptance_of, features_of

import runtime
from compress.core.run_directory import RunDirectory
from compress.distill.draft import METHODS
from compress.distill.draft.pard import ParallelStudent
from compress.distill.draft.speedup import worth
from compress.distill.draft.student import Student
from compress.distill.draft.training import DraftTraining
from compress.distill.train.data import TextRows
from compress.distill.train.teacher import Teacher
from compress.model.stage import Store
from compress.run.run import apply_recipe

SHORT = {"data": "given", "steps": 4, "batch_size": 4, "evaluate_every": 2, "learning_rate": 1e-2}


def random_rows(count: int, length: int, seed: int = 4) -> torch.Tensor:
    return torch.randint(1, 256, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def loaded(tiny_artifact: Path) -> Any:
    return runtime.load(tiny_artifact, verify=False, device="cpu")


@pytest.fixture
def make(loaded: Any, tmp_path: Path) -> Callable[..., DraftTraining]:
    def build(**changes: Any) -> DraftTraining:
        told = SimpleNamespace(phase=lambda *_: None, step=lambda *_: None, tracking=UNTRACKED)
        fields = {
            "artifact": loaded.artifact.path, "teacher": Teacher.of(loaded), "rows": random_rows(16, 24), "kinds": {},
            "store": Store(tmp_path / "draft", tmp_path / "work", RunDirectory(tmp_path), apply_recipe), "reporter": told,
        }  # fmt: skip
        return DraftTraining(**{**fields, **changes})

    return build


def config(method: str, **changes: Any) -> Any:
    return METHODS[method].config(**{**SHORT, "tokens": 3, **changes})


@pytest.mark.parametrize("quantize", ["none", "W4A16"])
def test_what_is_measured_is_what_was_stored(make: Any, monkeypatch: pytest.MonkeyPatch, quantize: str) -> None:
    """Against the directory as the runtime reads it."""
    training, trained = make(), []
    write = DraftTraining.write

    def writing(self: DraftTraining, fields: Any, student: Student, held_out: TextRows) -> None:
        trained.append(self.measure(fields, student, held_out))
        write(self, fields, student, held_out)

    monkeypatch.setattr(DraftTraining, "write", writing)
    fields = config("distillspec", quantize=quantize, layers=2)
    METHODS["distillspec"].make(training, fields)
    stored = runtime.load(training.store.output, dtype="float32", kernels="reference", device="cpu", drafter=False)
    held_out = training.split()[1]
    found = acceptance_of(stored.engine.module, training.teacher, held_out, length=3)
    after = training.facts["after"]["held_out"]
    for way in ("greedy", "sampling"):
        for part in ("text", "continuations"):
            assert after[part][way]["acceptance"] == pytest.approx(found[part][way]["acceptance"], abs=1e-5)
    in_training = trained[0]["held_out"]["text"]["sampling"]["acceptance"]
    assert abs(after["text"]["sampling"]["acceptance"] - in_training) > 1e-7
    # Nothing but the curve is of the weights that were not stored.
    assert not {"before", "after"} & training.facts["training"].keys()
    assert json.loads((training.store.output / "draft.json").read_text())["facts"] == json.loads(
        json.dumps(training.facts)
    )


@pytest.mark.parametrize("method", ["medusa", "kangaroo"])
def test_heads_and_adapters_are_measured_as_they_are_stored(
    make: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    seen: list[list[torch.Tensor]] = []
    measure = DraftTraining.measure

    def measuring(self: DraftTraining, fields: Any, student: Student, held_out: TextRows) -> Any:
        seen.append([each.detach().clone() for each in student.parameters() if each.requires_grad])
        return measure(self, fields, student, held_out)

    monkeypatch.setattr(DraftTraining, "measure", measuring)
    METHODS[method].make(make(), config(method, **({"exit_layer": 1} if method == "kangaroo" else {})))
    assert len(seen) == 2
    assert all(torch.equal(each, each.bfloat16().float()) for each in seen[1])


def test_the_accept_head_reads_the_stored_draft(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.distill.draft import distillspec

    seen: list[torch.Tensor] = []
    fit = distillspec.fit_accept_head

    def fitting(student: Student, *arguments: Any) -> Any:
        weight: Any = student.draft.get_parameter("model.layers.0.mlp.up_proj.weight")
        seen.append(weight.detach().clone())
        return fit(student, *arguments)

    monkeypatch.setattr(distillspec, "fit_accept_head", fitting)
    training = make()
    METHODS["distillspec"].make(training, config("distillspec", layers=1, quantize="W4A16", accept_head=True))
    assert int((seen[0][0].unique()).numel()) <= 16  # of one scale a row
    assert (training.store.output / "accept_head.safetensors").is_file()


def test_a_parallel_draft_is_the_same_drafter_before_and_after(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []
    measure = DraftTraining.measure

    def measuring(self: DraftTraining, fields: Any, student: Student, held_out: TextRows) -> Any:
        kinds.append(type(student))
        return measure(self, fields, student, held_out)

    monkeypatch.setattr(DraftTraining, "measure", measuring)
    training = make()
    METHODS["pard"].make(training, config("pard", layers=1))
    assert kinds == [ParallelStudent, ParallelStudent]
    assert training.facts["cost"]["tokens"] == 3  # one pass for so many
    assert training.facts["cost"]["bytes"] / training.facts["cost"]["of_target"] == pytest.approx(
        whole_bytes(training), rel=1e-3
    )


def whole_bytes(training: DraftTraining) -> float:
    """Bytes that the target reads for a token."""
    from compress.distill.draft.student import read_bytes

    return read_bytes(training.artifact)


@pytest.mark.parametrize("method", ["medusa", "mtp"])
def test_a_pass_of_heads_is_paid_whole(make: Any, method: str) -> None:
    training = make()
    METHODS[method].make(training, config(method, tokens=2))
    one_pass = method == "medusa"
    assert training.facts["cost"]["tokens"] == (2 if one_pass else 1)
    for when in ("before", "after"):
        assert training.facts["worth"][when] == worth(
            training.facts[when], training.facts["cost"]["of_target"], one_pass=one_pass
        )


def test_long_drafts_are_measured_as_far_as_texts_go(make: Any) -> None:
    training = make(kinds={"text": random_rows(2, 64), "code": random_rows(2, 16)})
    from compress.distill.draft.cut import cut_checkpoint

    student = Student(cut_checkpoint(training.artifact, range(1)))
    found = training.measure(config("distillspec", tokens=40), student, TextRows(random_rows(2, 24)))
    assert {kind: each["length"] for kind, each in found.items()} == {"held_out": 6, "text": 16, "code": 4}
    assert all(each["continuations"]["greedy"]["steps"] > 0 for each in found.values())


def test_the_target_writes_once_for_all_that_is_measured(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    training = make(kinds={"text": random_rows(3, 16)})
    continuations = training.teacher.continuations

    def counting(prompts: torch.Tensor, *arguments: Any) -> Any:
        calls.append(len(prompts))
        return continuations(prompts, *arguments)

    monkeypatch.setattr(training.teacher, "continuations", counting)
    METHODS["s2d"].make(training, config("s2d", layers=2))
    assert calls == [2, 2, 3, 3]  # held-out rows and samples, greedily and by sampling


def test_a_target_that_ends_at_once_leaves_nothing_to_measure(make: Any, loaded: Any) -> None:
    own = Teacher.of(loaded)

    def write(prompts: torch.Tensor, tokens: int, temperature: float, seeds: Any) -> Any:
        written, _ = own.continuations(prompts, tokens, temperature, seeds)
        return written, torch.ones(len(prompts), dtype=torch.int64)

    short = replace(own, continuations=write)
    training = make(teacher=short, kinds={"text": random_rows(2, 16)})
    from compress.distill.draft.cut import cut_checkpoint

    found = training.measure(
        config("distillspec"), Student(cut_checkpoint(training.artifact, range(1))), TextRows(random_rows(2, 24))
    )
    for each in found.values():
        assert each["continuations"] == {"greedy": None, "sampling": None}
        assert each["text"]["greedy"]["steps"] > 0
    assert worth(found, 0.1) == {"held_out": {}, "text": {}}


# ---------------------------------------------------------------- where it computes
class ReachedError(Exception):
    pass


@pytest.mark.parametrize("method", ["medusa", "mtp"])
def test_heads_go_to_where_the_target_is_before_they_are_measured(
    make: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(Student, "to", lambda self, device: moved.append(device) or self)
    monkeypatch.setattr(DraftTraining, "measure", lambda *_: (_ for _ in ()).throw(ReachedError))
    training = make()
    with pytest.raises(ReachedError):
        METHODS[method].make(training, config(method, tokens=2))
    assert moved == [training.teacher.device]


def test_the_target_is_loaded_once(make: Any, loaded: Any) -> None:
    features = features_of(make().teacher.source)
    assert features.module is loaded.engine.module
    assert features.teacher.source is loaded


def test_training_is_where_the_target_is(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device accelerate would take."""
    from accelerate import Accelerator

    from compress.distill.draft.cut import cut_checkpoint

    monkeypatch.setattr(Accelerator, "device", property(lambda self: torch.device("meta")))
    training = make()
    student = Student(cut_checkpoint(training.artifact, range(1)))
    given, held_out = training.split()
    trained = training.train(config("distillspec"), student, TextRows(given), held_out)
    assert trained.steps == 4
    assert {parameter.device.type for parameter in student.parameters()} == {"cpu"}
