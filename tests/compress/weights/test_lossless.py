"""Runs with scheme DF11: the artifact has the weights of the model bit for bit, sizes are those of the manifest, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import same_bytes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import compress
import runtime
from compress.recipe import load
from compress.run.plan import make_plan
from compress.weights import block_pass
from export import targets
from export.readers import readable_by
from export.source import Source
from runtime.errors import CompressError, RequestError
from runtime.formats.dfloat11 import DFloat11
from runtime.layers.compressed_linear import CompressedLinear

STAGE = {"quantize": {"method": "rtn", "scheme": "DF11"}}
WIDE = {"hidden_size": 128, "intermediate_size": 256}
IDS = torch.randint(3, 60, (2, 19), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_weights_and_reference_logits_are_bit_identical(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    model = make_checkpoint(tie_word_embeddings=False, **WIDE)
    stage = {"quantize": {**STAGE["quantize"], "targets": ["Linear", "Embedding"], "ignore": []}}
    out = tmp_path / "out"
    compress.apply(recipe(model, stage, evaluate={"samples": 4, "sequence_length": 32}), output=out, quiet=True)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    wanted = original(IDS).logits.float()
    assert torch.equal(runtime.load(out, kernels="reference").logits(IDS), wanted)
    theirs = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.bfloat16
    )  # `import runtime` has registered the method
    layers = {name: module for name, module in theirs.named_modules() if isinstance(module, CompressedLinear)}
    assert len(layers) == 22
    for name, module in layers.items():
        assert torch.equal(module.dense().weight, original.get_submodule(name).weight)
    # The kernels add in another order than torch's products do, where the CPU has bfloat16 instructions.
    torch.testing.assert_close(theirs(IDS).logits.float(), wanted, atol=0.03, rtol=0.03)

    manifest = json.loads((out / "compress.json").read_text())
    assert manifest["metrics"]["kl"] == 0.0
    for layer in manifest["layers"]:
        assert layer["error"] == 0.0
        assert 11 < layer["bits"] < 12
    shards = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    sizes = {}
    for name, file in shards.items():
        with safe_open(out / file, "pt") as stream:
            sizes[name] = stream.get_tensor(name).nbytes
    head = {name: own for name, own in sizes.items() if name.startswith("lm_head.weight_")}
    account = manifest["tensors"]["lm_head.weight"]
    assert sorted(head) == account["stored_as"]
    assert sum(head.values()) == account["bytes_after"] < 0.75 * account["bytes_before"]
    assert sum(sizes.values()) == manifest["bytes"]["after"]


def test_a_plan_says_that_sizes_are_estimates(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    request = recipe(make_checkpoint(**WIDE), STAGE)
    plan = make_plan(load(request), readers=readable_by)
    assert any("21 tensors are estimates" in text for text in plan.warnings)
    compress.apply(request, output=tmp_path / "out", quiet=True)
    made = json.loads((tmp_path / "out" / "compress.json").read_text())["bytes"]["after"]
    assert plan.bytes_after == pytest.approx(made, rel=0.01)
    who = {row["name"]: (row["how"], row["note"]) for row in plan.readable_by}
    assert who["this runtime"][0] == "yes"
    assert who["transformers"][0] == "with import runtime"
    assert {who[name][0] for name in ("vLLM", "SGLang", "llama.cpp")} == {"no"}
    assert "dfloat11" in who["llama.cpp"][1]
    source = Source(tmp_path / "out")
    for name in ("gguf", "huggingface", "onnx", "tensorrt"):
        target = targets.get(name)
        assert "stored as representation dfloat11" in str(target.reason_against(source, target.options()))


def test_an_interrupted_run_ends_with_the_same_bytes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = recipe(make_checkpoint(**WIDE), STAGE)
    compress.apply(request, output=tmp_path / "straight", quiet=True)
    real = block_pass.run_block

    def fail(job: Any, index: int, states: Any) -> Any:
        if index == 1:
            raise CompressError("stopped")
        return real(job, index, states)

    monkeypatch.setattr(block_pass, "run_block", fail)
    with pytest.raises(CompressError, match="stopped"):
        compress.apply(request, output=tmp_path / "resumed", quiet=True)
    monkeypatch.setattr(block_pass, "run_block", real)
    compress.apply(request, output=tmp_path / "resumed", quiet=True, resume=True)
    same_bytes(tmp_path / "straight", tmp_path / "resumed")


@torch.inference_mode()
def test_a_layer_that_would_not_get_smaller_stays_as_it_is(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    model = make_checkpoint(tie_word_embeddings=False, **WIDE)
    tensors = load_file(model / "model.safetensors")
    names = ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.embed_tokens.weight")
    for name in names:  # exponents of 64 kinds, all alike
        spread = torch.randint(90, 125, tensors[name].shape).float().sub(127).exp2()
        tensors[name] = (spread * tensors[name].float().sign()).bfloat16()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    stage = {"quantize": {**STAGE["quantize"], "targets": ["Linear", "Embedding"], "ignore": []}}
    compress.apply(recipe(model, stage), output=tmp_path / "out", quiet=True)
    manifest = json.loads((tmp_path / "out" / "compress.json").read_text())
    for name in names:
        account = manifest["tensors"][name]
        assert account["action"] == "copied"
        assert "dfloat11 would take" in account["reason"]
        assert account["bytes_after"] == account["bytes_before"]
    assert len(manifest["layers"]) == 20
    assert "dfloat11 would take" in (tmp_path / "out" / "report.html").read_text()
    wanted = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)(IDS).logits.float()
    assert torch.equal(runtime.load(tmp_path / "out", kernels="reference").logits(IDS), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_models_of_other_dtypes_are_refused(make_checkpoint: Any, recipe: Any, dtype: torch.dtype) -> None:
    named = str(dtype).removeprefix("torch.")
    said = rf"stages\.0\.quantize\.scheme: .*q_proj: dfloat11 stores bfloat16 weights, and the model's are {named}"
    with pytest.raises(RequestError, match=said):
        make_plan(load(recipe(make_checkpoint(dtype=dtype, **WIDE), STAGE)))


def test_other_methods_are_refused(make_checkpoint: Any, recipe: Any) -> None:
    stage = {"quantize": {"method": "gptq", "scheme": "DF11"}}
    with pytest.raises(RequestError, match="'DF11' stores weights without loss and rounds nothing: method must be rtn"):
        make_plan(load(recipe(make_checkpoint(**WIDE), stage)))
    pruned = [{"prune": {"method": "magnitude", "pattern": "2:4"}}, STAGE]
    with pytest.raises(RequestError, match="an earlier stage prunes them"):
        make_plan(load(recipe(make_checkpoint(**WIDE), *pruned)))


def test_weights_that_would_not_stay_the_model_s_are_refused(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    model = make_checkpoint(tie_word_embeddings=True, **WIDE)
    folding = {"quantize": {"method": "awq", "scheme": "W4A16", "group_size": 32, "targets": ["*o_proj", "*down_proj"]}}
    with pytest.raises(RequestError, match=r"stages\.1\.quantize\.scheme: .*stage 0 scales weights"):
        make_plan(load(recipe(model, folding, {"quantize": {**STAGE["quantize"], "targets": ["*v_proj", "*up_proj"]}})))
    head = {"quantize": {**STAGE["quantize"], "ignore": []}}
    with pytest.raises(RequestError, match=r"lm_head: it shares its weight with another module"):
        make_plan(load(recipe(model, head)))
    wider = tmp_path / "wider"
    shutil.copytree(model, wider)
    tensors = load_file(wider / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].float() / 3
    save_file(tensors, wider / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"q_proj: dfloat11 stores bfloat16 weights, and the model's are float32"):
        make_plan(load(recipe(wider, STAGE)))


def test_a_representation_that_is_not_lossless_is_found(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small what is lost."""
    real = DFloat11.dequantize

    def rounded(self: DFloat11, codes: torch.Tensor, parameters: Any, dtype: torch.dtype) -> torch.Tensor:
        dense = real(self, codes, parameters, dtype).clone()
        dense[0, 0] += 1e-30 if dense[0, 0] == 0 else dense[0, 0] * 2.0**-7
        return dense

    monkeypatch.setattr(DFloat11, "dequantize", rounded)
    with pytest.raises(CompressError, match=r"_proj: dfloat11 does not give the weight back exactly"):
        compress.apply(recipe(make_checkpoint(**WIDE), STAGE), output=tmp_path / "out", quiet=True)
