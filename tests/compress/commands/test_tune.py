"""Measuring kernels ahead: once, without a limit of time, and in no later load or request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import bert, save

import compress
import runtime
from compress.cli import main
from runtime.api.tune import passes
from runtime.errors import RequestError
from runtime.kernels import tuning
from runtime.kernels.cpu import library
from runtime.kernels.triton import tuning as launches
from runtime.layers.compressed_linear import CompressedLinear

needs_c = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}


@pytest.fixture
def artifact(make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "remembered", {})
    stage = {"quantize": {"method": "rtn", "bits": 4, "group_size": 64, "scales": "minmax"}}
    return compress.apply(recipe(make_checkpoint(**WIDE), stage), output=tmp_path / "out", quiet=True).path


@needs_c
def test_choices_are_measured_once_and_kept(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(tuning, "BUDGET", 0.0)  # loading alone measures nothing
    runtime.load(artifact)
    assert not (tmp_path / "another" / "tuning").exists()
    (found,) = runtime.tune(artifact, prompt=8).items()
    assert json.loads(Path(found[0]).read_text())["choices"] == found[1]
    assert found[1]
    assert runtime.tune(artifact, prompt=8) == {}
    monkeypatch.setattr(tuning, "remembered", {})  # another process
    monkeypatch.setattr(tuning, "_measured", lambda *_: pytest.fail("measured again"))
    assert runtime.tune(artifact) == {}


@needs_c
def test_the_command_shows_what_it_measured(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(artifact), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"measured"}
    assert main(["tune", str(artifact)]) == 0
    assert "Nothing was left to measure" in capsys.readouterr().out
    assert main(["tune", str(artifact), "--batch-size", "0"]) == 2


def test_passes_meet_every_class_of_rows(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = runtime.load(artifact, kernels="reference", device="cpu")
    model.engine.context_length = 40
    seen: set[int] = set()
    compute = CompressedLinear.compute

    def noted(layer: CompressedLinear, x: torch.Tensor, bias: Any) -> torch.Tensor:
        seen.add(launches.row_class(x.numel() // layer.in_features))
        return compute(layer, x, bias)

    monkeypatch.setattr(CompressedLinear, "compute", noted)
    every = list(passes(model, 100, 5))
    assert [len(each[0]) for each in every] == [1, 2, 4, 8, 16, 32, 38, 8, 8, 8]
    assert [len(each) for each in every[7:]] == [2, 4, 5]
    for prompts in every:
        model.generate(prompts, max_new_tokens=2, ignore_eos=True)
    assert seen >= {1, 2, 4, 8, 16, 32, 64}
    assert [len(each[0]) for each in passes(model, 1, 1)] == [1]


def test_what_generates_no_text_is_refused(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt is 0, expected a positive number"):
        runtime.tune(artifact, prompt=0)
    with pytest.raises(RequestError, match="generates no text"):
        runtime.tune(save(bert(), tmp_path / "bert"))
