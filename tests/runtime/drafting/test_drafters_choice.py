"""drafter.json: what was found to be fastest is used, for what it was measured with and on alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_engines import engines
from tiny_models import llama, save

import runtime
from compress.evaluate.drafters import write_choice
from runtime.checkpoint.artifact import Artifact
from runtime.drafting.config import artifact_draft as measured_choice
from runtime.drafting.config.artifact_draft import CHOICE, read_choice
from runtime.drafting.config.build import Target, choose_speculation
from runtime.drafting.drafters.composition import Fallback
from runtime.drafting.drafters.lookup import Lookup
from runtime.drafting.drafters.model import ModelDrafter
from runtime.errors import ArtifactError, RequestError

CPU = torch.device("cpu")


@pytest.fixture
def target(tmp_path: Path) -> Target:
    path = save(llama(), tmp_path / "own")
    save(llama(num_hidden_layers=1), path / "draft")
    artifact = Artifact(path)
    artifact.manifest = {"draft": {"drafter": {"model": "draft"}}}
    return Target(artifact, engines(llama())[0])


def test_the_choice_of_the_bench_is_used(target: Target) -> None:
    path = target.artifact.path
    assert read_choice(target.artifact, CPU) is None
    file = write_choice(path, {"of": ["lookup", "suffix"]}, target.artifact, CPU, [{"name": "lookup", "overall": 1.2}])
    assert file == path / CHOICE
    assert sorted(each.name for each in path.iterdir() if each.name.startswith((".", "drafter"))) == [CHOICE]
    found = choose_speculation(None, target)
    assert found is not None
    assert isinstance(found.drafter, Fallback)
    assert json.loads(file.read_text())["measured"] == [{"name": "lookup", "overall": 1.2}]
    write_choice(path, False, target.artifact, CPU)
    assert choose_speculation(None, target) is None
    write_choice(path, True, target.artifact, CPU)
    found = choose_speculation(None, target)
    assert found is not None
    assert isinstance(found.drafter, ModelDrafter)
    write_choice(path, "lookup", target.artifact, CPU)
    assert isinstance(runtime.load(path, device="cpu").speculation, type(None))  # of a directory without that draft
    target.artifact.manifest = None
    write_choice(path, "lookup", target.artifact, CPU)
    loaded = runtime.load(path, device="cpu").speculation
    assert loaded is not None
    assert isinstance(loaded.drafter, Lookup)


def other_weights(target: Target, monkeypatch: Any) -> None:
    model = llama()
    model.model.norm.weight.data += 1
    save(model, target.artifact.path)
    manifest = target.artifact.manifest
    target.artifact = Artifact(target.artifact.path)
    target.artifact.manifest = manifest


def other_draft(target: Target, monkeypatch: Any) -> None:
    target.artifact.manifest = {"draft": {"drafter": {"model": "draft"}, "facts": {"steps": 2}}}


def other_machine(target: Target, monkeypatch: Any) -> None:
    monkeypatch.setattr(measured_choice, "machine", lambda device: "another CPU")


def older_file(target: Target, monkeypatch: Any) -> None:
    (target.artifact.path / CHOICE).write_text(
        json.dumps({"drafter": "lookup", "machine": measured_choice.machine(CPU)})
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_weights, "was measured with other weights and is not used; measure again"),
        (other_draft, "was measured with another draft and is not used"),
        (other_machine, "was measured with another machine and is not used"),
        (older_file, "is of schema version None and is not used"),
    ],
)
def test_a_choice_of_something_else_is_not_used(
    target: Target, monkeypatch: Any, caplog: Any, change: Any, said: str
) -> None:
    """What the artifact brings itself is, as if there were no choice."""
    write_choice(target.artifact.path, "lookup", target.artifact, CPU)
    change(target, monkeypatch)
    found = choose_speculation(None, target)
    assert found is not None
    assert isinstance(found.drafter, ModelDrafter)
    assert said in caplog.text


def test_a_choice_of_a_draft_that_is_gone_refuses_no_load(target: Target) -> None:
    write_choice(target.artifact.path, {"of": ["lookup", True]}, target.artifact, CPU)
    target.artifact.manifest = {"schema_version": 1}
    assert choose_speculation(None, target) is None


def test_what_a_choice_must_not_name(target: Target, tmp_path: Path) -> None:
    file = write_choice(target.artifact.path, "lookup", target.artifact, CPU)
    content = json.loads(file.read_text())
    for value in (
        {"model": "/etc"},
        "/etc",
        ["lookup"],
        {"of": ["lookup", {"model": "draft"}]},
        {"of": [{"of": ["/etc"]}]},
    ):
        with pytest.raises(RequestError, match=r"drafter.json: expected names of drafters, .* got"):
            write_choice(target.artifact.path, value, target.artifact, CPU)
        file.write_text(json.dumps({**content, "drafter": value}))
        with pytest.raises(RequestError, match=rf"{file}: expected names of drafters"):
            choose_speculation(None, target)
    file.write_text("{")
    with pytest.raises(ArtifactError, match=r"drafter\.json"):
        choose_speculation(None, target)
    with pytest.raises(RequestError, match="--no-save"):
        write_choice(tmp_path / "nowhere", "lookup", target.artifact, CPU)


def test_machines_have_names() -> None:
    assert measured_choice.machine(CPU)
    assert measured_choice.machine(CPU) == measured_choice.machine(torch.device("cpu"))
