"""Checkpoints as they are published: any float type, 8-bit floats with scales, layers that the model has no place for, adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from family_sources import W4, applied, set_config, source
from safetensors.torch import load_file, save_file

import compress
import runtime
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError

LARGEST = 448.0  # of float8_e4m3fn


def shards(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_float_type_keeps_its_own(dtype: torch.dtype, tmp_path: Path) -> None:
    path = source("llama", tmp_path / "model", dtype)
    artifact = applied(path, tmp_path / "out")
    before, after = Checkpoint(path), Checkpoint(artifact.path)
    compressed = {n for n, entry in artifact.manifest["tensors"].items() if entry["action"] == "compressed"}
    assert set(before.names()) - compressed == set(before.names()) & set(after.names())
    for name in set(before.names()) - compressed:
        assert torch.equal(before.get(name), after.get(name))
    assert after.dtype("model.layers.0.mlp.up_proj.weight_scale") == dtype
    assert len(runtime.load(artifact.path).generate([5, 3, 80], max_new_tokens=4)) <= 4


def as_float8(path: Path, kind: str) -> Path:
    """Beside `path`: the same with the linear layers of its blocks in 8-bit floats; `path` gets the weights that these stand for."""
    other = path.with_name(f"{path.name}-{kind}")
    shutil.copytree(path, other)
    stored, meant = load_file(path / "model.safetensors"), {}
    written = dict(stored)
    for name, weight in stored.items():
        if weight.ndim != 2 or ".layers." not in name or ".gate." in name:
            continue
        wide = weight.double()
        if kind == "block":
            rows, columns = (-(-size // 48) for size in weight.shape)
            padded = torch.zeros(rows * 48, columns * 48, dtype=torch.float64)
            padded[: weight.shape[0], : weight.shape[1]] = wide
            scale = padded.view(rows, 48, columns, 48).abs().amax((1, 3)) / LARGEST
            spread = scale.kron(torch.ones(48, 48, dtype=torch.float64))[: weight.shape[0], : weight.shape[1]]
        else:
            scale = (wide.abs().amax(1, keepdim=True) if kind == "row" else wide.abs().amax()) / LARGEST
            spread = scale.expand_as(wide)
        scale = scale.float()
        spread = spread.float()
        codes = (wide / spread).to(torch.float8_e4m3fn)
        written[name] = codes
        written[name.replace(".weight", ".weight_scale_inv" if kind == "block" else ".weight_scale")] = scale
        if kind == "tensor":
            written[name.replace(".weight", ".input_scale")] = torch.ones(())
        meant[name] = (codes.float() * spread).to(weight.dtype)
    save_file({**stored, **meant}, path / "model.safetensors", {"format": "pt"})
    save_file(written, other / "model.safetensors", {"format": "pt"})
    settings = {"block": {"quant_method": "fp8", "weight_block_size": [48, 48]}, "row": {"quant_method": "fbgemm_fp8"}}
    set_config(other, quantization_config=settings.get(kind, {"quant_method": "compressed-tensors"}))
    return other


@pytest.mark.parametrize(("family", "kind"), [("llama", "row"), ("llama", "tensor"), ("deepseek_v3", "block")])
def test_8_bit_floats_are_what_they_stand_for(family: str, kind: str, tmp_path: Path) -> None:
    """The artifact of such a checkpoint is that of the weights in full, byte for byte, and every scale is accounted for."""
    wide = source(family, tmp_path / "model")
    narrow = as_float8(wide, kind)
    one, other = applied(wide, tmp_path / "one"), applied(narrow, tmp_path / "other")
    assert shards(other.path) == shards(one.path)
    entries = other.manifest["tensors"]
    scales = [name for name in Checkpoint(narrow).names() if name.endswith(("_scale", "_scale_inv"))]
    assert scales
    assert {entries[name]["action"] for name in scales} == {"dropped"}
    name = "model.layers.1.self_attn.o_proj.weight"
    assert entries[name]["bytes_before"] == one.manifest["tensors"][name]["bytes_before"] // 2
    mine, theirs = (json.loads((a.path / "config.json").read_text()) for a in (one, other))
    assert mine == theirs


@pytest.mark.slow
def test_8_bit_floats_are_cut_and_pruned_too(tmp_path: Path) -> None:
    """Where a stage before makes another checkpoint."""
    wide = source("llama", tmp_path / "model")
    narrow = as_float8(wide, "block")
    stages = {"structure": {"method": "magnitude", "keep": 64}}, W4
    one, other = applied(wide, tmp_path / "one", *stages), applied(narrow, tmp_path / "other", *stages)
    assert shards(other.path) == shards(one.path)


def test_the_plan_counts_what_is_written_of_8_bit_floats(tmp_path: Path) -> None:
    """Layers that are copied are written in full."""
    narrow = as_float8(source("llama", tmp_path / "model"), "block")
    stage = {
        "quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32, "targets": ["model.layers.0.mlp.up_proj"]}
    }
    request = {"name": "test", "model": str(narrow), "stages": [stage]}
    planned = compress.plan(request)
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert planned.bytes_after == made.manifest["bytes"]["after"]
    assert planned.bytes_after > planned.bytes_before


def test_a_scale_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    narrow = as_float8(source("llama", tmp_path / "model"), "row")
    file = narrow / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    save_file({**tensors, name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(Exception, match=rf"{name} .*\[95, 1\]"):
        applied(narrow, tmp_path / "out")
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(Exception, match=r"up_proj\.weight .*weight_scale"):
        applied(narrow, tmp_path / "out")


def test_what_is_compressed_otherwise_is_refused(tmp_path: Path) -> None:
    made = applied(source("llama", tmp_path / "model"), tmp_path / "once")
    with pytest.raises(RequestError, match="quant_method compressed-tensors"):
        applied(made.path, tmp_path / "twice")


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    """It would be lost without a word: the artifact would be of the model without it."""
    path = source("llama", tmp_path / "model")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, path / "adapter_model.safetensors")
    with pytest.raises(RequestError, match=r"adapter_config\.json"):
        applied(path, tmp_path / "out")


@pytest.mark.slow
def test_one_tensor_that_becomes_several(tmp_path: Path) -> None:
    """Nomic's queries, keys and values: each layer has its rows, and the manifest says of which tensor."""
    from transformers import NomicBertModel

    path = source("nomic_bert", tmp_path / "model", torch.float32)
    asked = {"name": "test", "model": str(path), "calibration": {"sequence_length": 64, "samples": 8}}
    stored = Checkpoint(path)
    name = "encoder.layers.1.attn.Wqkv.weight"
    stage = {"quantize": {**W4["quantize"], "targets": ["re:.*0.self_attn"]}}
    made = compress.apply({**asked, "stages": [stage]}, output=tmp_path / "out", quiet=True)
    after = Checkpoint(made.path)
    for leaf, expected in zip("qkv", stored.get(name).chunk(3), strict=True):
        own = f"layers.1.self_attn.{leaf}_proj.weight"
        assert torch.equal(after.get(own), expected)
        assert made.manifest["tensors"][own]["source_name"] == name
    stage = {"structure": {"method": "magnitude", "remove": "ffn", "keep": 64}}
    cut = compress.apply({**asked, "stages": [stage]}, output=tmp_path / "cut", quiet=True)
    ids = torch.tensor([[3, 17, 80, 101, 5, 64]])
    with torch.inference_mode():
        theirs = NomicBertModel.from_pretrained(cut.path).eval()(input_ids=ids).last_hidden_state
    assert torch.allclose(runtime.load(cut.path).hidden_states(ids), theirs, atol=1e-4)
