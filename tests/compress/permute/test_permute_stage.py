"""Stage `permute`: the same weights in another order, the same function, groups of alike channels, and an artifact that says its order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES
from random_models import UNLIMITED
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.permute.stage import PermutedCheckpoint
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError

PERMUTE = {"permute": {"method": "activation"}}


def applied(model: Path, text: Path, output: Path, *stages: dict[str, Any], resume: bool = False) -> Path:
    data = {"data": str(text), "samples": 4, "sequence_length": 64}
    recipe = {"name": "permuted", "model": str(model), "stages": [PERMUTE, *stages], "calibration": data}
    recipe["evaluate"] = {**data, "samples": 2, **UNLIMITED}
    return compress.apply(recipe, output=output, resume=resume, quiet=True).path


def record(path: Path) -> dict[str, Any]:
    return json.loads((path / "compress.json").read_text())["passes"][0]


def logits(path: Path) -> torch.Tensor:
    ids = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)(ids).logits


def test_the_artifact_says_its_order_and_has_the_same_weights(
    tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    model = tiny_llama()
    made = applied(model, tiny_text, tmp_path / "out")
    found, before, after = record(made), Checkpoint(model), Checkpoint(made)
    assert found["permute"] == "activation"
    assert sorted(found["orders"]) == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    for name in before.names():
        layer = name.split(".mlp.")[0]
        order = torch.tensor(found["orders"].get(f"{layer}.mlp.down_proj", []), dtype=torch.int64)
        old = before.get(name)
        if ".mlp." in name:
            assert order.sort().values.tolist() == list(range(len(order)))
            assert order.tolist() != list(range(len(order)))
            old = old[:, order] if "down_proj" in name else old[order]
        assert torch.equal(after.get(name), old), name
    whole, permuted = logits(model), logits(made)
    assert float((permuted - whole).norm() / whole.norm()) < 1e-13


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt2", "starcoder2", "falcon", "olmo"])
def test_families_compute_what_they_did(name: str, tiny_text: Path, tmp_path: Path) -> None:
    """Fused gate and up projections, biases of channels, transposed weights: to the last bits in float64."""
    model = tmp_path / "source"
    next(family for family in FAMILIES if family.name == name).write(model)
    made = applied(model, tiny_text, tmp_path / "out")
    assert len(record(made)["orders"]) == 2
    whole, permuted = logits(model), logits(made)
    assert float((permuted - whole).norm() / whole.norm()) < 1e-13
    assert any(
        not torch.equal(Checkpoint(model).get(key), Checkpoint(made).get(key)) for key in Checkpoint(made).names()
    )


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_in_one_tensor_are_refused(name: str, tiny_text: Path, tmp_path: Path) -> None:
    next(family for family in FAMILIES if family.name == name).write(tmp_path / "source")
    with pytest.raises(RequestError, match=r"stages.0.permute: the channels of a \w+ cannot be renumbered"):
        applied(tmp_path / "source", tiny_text, tmp_path / "out")


def test_groups_hold_alike_channels(tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path) -> None:
    """On text of the same kind the energy of channels falls from group to group."""
    made = applied(tiny_llama(), tiny_text, tmp_path / "out")
    model, seen = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32), []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].square().mean((0, 1))))
    with torch.no_grad():
        ids = AutoTokenizer.from_pretrained(made)(tiny_text.read_text())["input_ids"][:1024]
        model(torch.tensor(ids).view(-1, 64))
    for energy in seen:
        groups = energy.view(-1, 32).mean(1)
        assert torch.equal(groups, groups.sort(descending=True).values)
        assert float(groups[0]) > 4 * float(groups[-1])


def test_quantized_it_is_read_by_any_engine(tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path) -> None:
    """Groups are plain ones, of columns one after another: no index of groups is stored."""
    quantize = {"method": "gptq", "scheme": "W4A16", "group_size": 32, "order": "natural", "ignore": ["lm_head"]}
    made = applied(tiny_llama(), tiny_text, tmp_path / "out", {"quantize": quantize})
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"].get("actorder") is None
    assert not [name for name in Checkpoint(made).names() if "g_idx" in name]
    assert len(record(made)["orders"]) == 2


def test_an_interrupted_run_gives_the_same_bytes(
    tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = applied(tiny_llama(), tiny_text, tmp_path / "whole")
    block = PermutedCheckpoint.block

    def interrupted(self: PermutedCheckpoint, index: int) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return block(self, index)

    monkeypatch.setattr(PermutedCheckpoint, "block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        applied(tiny_llama(), tiny_text, tmp_path / "resumed")
    seen: list[int] = []
    monkeypatch.setattr(PermutedCheckpoint, "block", lambda self, index: (seen.append(index), block(self, index))[1])
    resumed = applied(tiny_llama(), tiny_text, tmp_path / "resumed", resume=True)
    assert seen == [1]
    files = [{file.name: file.read_bytes() for file in path.glob("*.safetensors")} for path in (whole, resumed)]
    assert files[0]
    assert files[0] == files[1]
    assert record(whole)["orders"] == record(resumed)["orders"]
