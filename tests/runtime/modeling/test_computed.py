"""What a model computes where no checkpoint stores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES
from safetensors.torch import load_file, save_file
from torch import nn

import runtime
from runtime.errors import ArtifactError
from runtime.modeling.unstored_buffers import compute_unstored

POSITIONS = "model.encoder.embed_positions.weight"


def marian(path: Path) -> Path:
    return next(family for family in FAMILIES if family.name == "marian").write(path)


def rewrite(path: Path, changes: dict[str, torch.Tensor], without: tuple[str, ...] = ()) -> None:
    file = path / "model.safetensors"
    held = {name: value for name, value in load_file(file).items() if name not in without}
    save_file({**held, **changes}, file, {"format": "pt"})


def tables(path: Path, **options: Any) -> torch.Tensor:
    return runtime.load(path, **options).engine.module.get_submodule(POSITIONS.removesuffix(".weight")).weight


def test_a_table_of_positions_is_computed_as_transformers_does(tmp_path: Path) -> None:
    from transformers import MarianMTModel

    path = marian(tmp_path / "model")
    assert POSITIONS not in load_file(path / "model.safetensors")
    theirs = MarianMTModel.from_pretrained(path).get_parameter(POSITIONS)
    assert torch.equal(tables(path), theirs)
    ours = runtime.load(path, dtype="bfloat16")
    ours.tokenizer = None
    assert tables(path, dtype="bfloat16").dtype == torch.bfloat16
    assert ours.generate([3, 17, 80], max_new_tokens=3)


def test_a_table_of_positions_that_is_stored_is_read(tmp_path: Path) -> None:
    path = marian(tmp_path / "model")
    rewrite(path, {POSITIONS: torch.full((128, 64), 0.5)})
    assert bool((tables(path) == 0.5).all())


def test_what_is_missing_otherwise_is_still_said(tmp_path: Path) -> None:
    path = marian(tmp_path / "model")
    name = "model.encoder.layers.0.fc1.weight"
    rewrite(path, {}, without=(name,))
    with pytest.raises(ArtifactError, match=name):
        runtime.load(path)


def test_what_would_be_drawn_at_random_is_missing() -> None:
    """Though transformers would do without it: an answer would be one of many."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    model._keys_to_ignore_on_load_missing = [r"mlp\.up_proj", r"^model\.norm"]
    state = torch.get_rng_state()
    compute_unstored(model, [])
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, nn.Parameter)
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert "weight" in model.model.norm._non_persistent_buffers_set
    assert torch.equal(model.model.norm.weight, torch.ones(16))
