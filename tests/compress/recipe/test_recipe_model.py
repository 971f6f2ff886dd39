"""Where a recipe's model is found, and the sentence when it is not."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from compress.recipe import load, locate_model
from runtime.errors import RequestError


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "recipes" / "checkpoints" / "small").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def make(written, **options):
        path = tmp_path / "recipes" / "r.yaml"
        path.write_text(f"name: t\nmodel: {written}\nstages:\n  - quantize: {{method: rtn}}\n")
        return load(path, **options)

    return make


@pytest.fixture
def hub(monkeypatch):
    """A hub that is out of reach; `asked` lists what was asked for."""
    asked: list[str] = []

    def snapshot_download(name, **options):
        asked.append(name)
        raise LocalEntryNotFoundError("cannot find the files locally and outgoing traffic is disabled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def refused(recipe) -> str:
    with pytest.raises(RequestError) as caught:
        locate_model(recipe)
    return str(caught.value)


def test_beside_the_recipe_first_then_the_working_directory(recipe, tmp_path):
    assert locate_model(recipe("checkpoints/small")) == tmp_path / "recipes" / "checkpoints" / "small"
    (tmp_path / "work" / "mine").mkdir()
    assert locate_model(recipe("mine")) == Path("mine")
    assert locate_model(recipe(str(tmp_path / "work" / "mine"))) == tmp_path / "work" / "mine"


def test_a_model_on_the_command_line_is_looked_up_where_the_command_runs(recipe, tmp_path):
    (tmp_path / "work" / "checkpoints" / "small").mkdir(parents=True)
    assert locate_model(recipe("checkpoints/small")) == tmp_path / "recipes" / "checkpoints" / "small"
    assert locate_model(recipe("x", model="checkpoints/small")) == Path("checkpoints/small")


@pytest.mark.parametrize(
    "name",
    ["../recipes/checkpoints/smal", "./checkpoints/smal", "../nowhere/at/all", "/no/such/place", "~/no-such-model"],
)
def test_a_path_that_is_missing_never_asks_the_hub(recipe, hub, name):
    assert f"model: no directory '{name}'" in refused(recipe(name))
    assert f"--model {name}: model: no directory '{name}'" in refused(recipe("x", model=name))
    assert hub == []


def test_the_nearest_directory_is_offered_with_file_and_line(recipe, hub, tmp_path):
    answer = refused(recipe("checkpoints/smal"))
    directory = tmp_path / "recipes"
    assert (
        answer
        == f"{directory}/r.yaml:2: model: no directory 'checkpoints/smal'; did you mean '{directory}/checkpoints/small'?"
    )


def test_a_hub_id_that_cannot_be_reached(recipe, hub):
    answer = refused(recipe("some-org/some-model"))
    assert "model: there is no directory 'some-org/some-model'" in answer
    assert hub == ["some-org/some-model"]


def test_a_plain_name_is_a_hub_id_with_a_hint(recipe, hub, tmp_path):
    (tmp_path / "work" / "my-llama").mkdir()
    assert refused(recipe("my-lama")).endswith("look for it there; did you mean 'my-llama'?")


def test_a_file_is_no_model(recipe, tmp_path):
    (tmp_path / "recipes" / "model.safetensors").write_bytes(b"")
    assert "is a file; a model is a directory with config.json and safetensors" in refused(recipe("model.safetensors"))


def test_a_hub_model_is_downloaded(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path / name))
    assert locate_model(recipe("org/model")) == tmp_path / "org" / "model"
