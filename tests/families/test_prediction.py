"""Layers for multi-token prediction (MTP), which checkpoints store behind the last block and transformers has no place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sources import applied, set_config, source
from safetensors.torch import load_file, save_file

import compress
import runtime
from compress.recipe import load
from compress.run.plan import make_plan
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError

CUTS: dict[str, dict[str, Any]] = {
    "ffn": {"method": "magnitude", "ratio": "25%", "multiple": 1},
    "heads": {"method": "magnitude", "ratio": "50%"},
    "hidden": {"method": "activation", "keep": 48, "multiple": 1},
    "experts": {"method": "routing", "keep": 3},
    "layers": {"method": "magnitude", "keep": 1},
}


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A DeepSeek-V3 of two layers as it is published: experts one by one, a third layer that predicts; and that layer's tensors."""
    path = source("deepseek_v3", tmp_path / "model")
    set_config(path, n_group=1)  # no groups, so that any number of experts may go
    file = path / "model.safetensors"
    tensors = load_file(file)
    more = {name.replace(".layers.1.", ".layers.2."): t.clone() for name, t in tensors.items() if ".layers.1." in name}
    more |= {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16(),
        "model.layers.2.enorm.weight": torch.ones(64).bfloat16(),
    }
    save_file({**tensors, **more}, file, {"format": "pt"})
    set_config(path, num_nextn_predict_layers=1)
    return path, more


def test_compression_keeps_it(published: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, more = published
    artifact = applied(path, tmp_path / "out")
    kept = Checkpoint(artifact.path)
    for name, value in more.items():
        assert artifact.manifest["tensors"][name]["action"] == "copied"
        assert torch.equal(kept.get(name), value)
    config = json.loads((artifact.path / "config.json").read_text())
    assert "model.layers.2.eh_proj" in config["quantization_config"]["ignore"], (
        "an engine that knows this layer must not look for compressed weights in it"
    )
    assert config["num_nextn_predict_layers"] == 1
    assert len(runtime.load(artifact.path).generate([5, 3, 80], max_new_tokens=4)) <= 4


def test_the_checkpoint_itself_runs(published: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Experts one by one are read by transformers, which must not make an error of the layer that it has no place for."""
    path, _ = published
    assert len(runtime.load(path).generate([5, 3, 80], max_new_tokens=4)) <= 4
    file = path / "model.safetensors"
    save_file({**load_file(file), "model.layers.1.strange": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r" model\.layers\.1\.strange\b"):
        runtime.load(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("remove", CUTS)
def test_what_cannot_be_cut_is_left_out_and_told_of(
    published: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, remove: str
) -> None:
    path, more = published
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)))
    calibration = {"data": str(text), "samples": 8, "sequence_length": 32}
    stages = [
        {"structure": {"remove": remove, **CUTS[remove]}},
        {"quantize": {"method": "rtn", "bits": 8, "group_size": 16}},
    ]
    request = {"name": "test", "model": str(path), "calibration": calibration, "stages": stages}
    warned = [w for w in make_plan(load(request), tmp_path / "out").warnings if "multi-token prediction" in w]
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    kept, config = Checkpoint(made.path), json.loads((made.path / "config.json").read_text())
    account = made.manifest["tensors"]
    if remove == "layers":  # it fits behind the layers that stay
        assert not warned
        assert config["num_hidden_layers"] == config["num_nextn_predict_layers"] == 1
        for name, value in more.items():
            assert torch.equal(kept.get(name.replace(".layers.2.", ".layers.1.")), value)
    else:
        assert len(warned) == 1
        assert "is left out" in warned[0]
        assert config["num_nextn_predict_layers"] == 0
        assert not any(".layers.2." in name for name in kept.names())
        assert {account[name]["action"] for name in more} == {"dropped"}
    assert len(runtime.load(made.path).generate([5, 3, 80], max_new_tokens=4)) <= 4
