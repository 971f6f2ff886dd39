"""Scales fold where the mathematics allows it, and nowhere else; folding leaves the function alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from compress.model.input_statistics import find_groups
from compress.weights.scale_folding import Fold, find_folds, fold


def block_of(path, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).requires_grad_(False).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
    seen = {}
    block = model.get_decoder().layers[0]
    handle = block.register_forward_pre_hook(lambda m, a, k: seen.update(args=a, kwargs=k), with_kwargs=True)
    model(torch.randint(0, 257, (2, 12)), use_cache=False)
    handle.remove()

    def run() -> torch.Tensor:
        out = block(*seen["args"], **seen["kwargs"])
        return out[0] if isinstance(out, tuple) else out

    return block, run


def linears(block):
    return [n for n, m in block.named_modules() if isinstance(m, nn.Linear)]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "opt"])
def test_folds_of_a_block(make_checkpoint, family):
    block, run = block_of(make_checkpoint(family, dtype=torch.float32))
    groups = find_groups(block, run, linears(block))
    assert [m.rpartition(".")[2] for m in groups[0].members] == ["q_proj", "k_proj", "v_proj"]
    places = {p.consumers[0].rpartition(".")[2]: p for p in find_folds(block, groups, groups, run)}
    assert places["q_proj"].offset == (1.0 if family == "gemma2" else 0.0)
    attention_out = "out_proj" if family == "opt" else "o_proj"
    assert places[attention_out].producer.endswith("v_proj")
    assert places[attention_out].repeat == (1 if family == "opt" else 2)
    if family == "opt":
        assert "fc2" not in places or places["fc2"].producer == "fc1"  # ReLU passes positive scales
    else:
        assert places["down_proj"].producer == "mlp.up_proj"
        assert places["gate_proj"].consumers == ("mlp.gate_proj", "mlp.up_proj")


@torch.no_grad()
def test_folding_keeps_the_function_and_scales_the_columns(make_checkpoint):
    block, run = block_of(make_checkpoint("llama", dtype=torch.float32))
    groups = find_groups(block, run, linears(block))
    before = run()
    work = {n: block.get_submodule(n).weight.data.clone() for n in linears(block)}
    original = {n: w.clone() for n, w in work.items()}
    for place in find_folds(block, groups, groups, run):
        columns = torch.rand(block.get_submodule(place.consumers[0]).in_features) + 0.5
        used = fold(block, place, place.shared(columns), work)
        for name in place.consumers:
            expected = original[name] * used
            if name == "mlp.up_proj":  # it is a producer too, and takes 1/s of down_proj's scale on its rows
                continue
            if name == "self_attn.v_proj":
                continue
            torch.testing.assert_close(work[name], expected)
    torch.testing.assert_close(run(), before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rounding_of_a_norm_is_given_back_to_its_readers(make_checkpoint):
    """A bf16 norm cannot hold w / s exactly; the readers take the scale that is really left, so the product is exact."""
    block, run = block_of(make_checkpoint("llama", dtype=torch.bfloat16), torch.bfloat16)
    groups = find_groups(block, run, linears(block))
    norm = block.input_layernorm
    norm.weight.data = torch.rand_like(norm.weight) + 0.5
    old = norm.weight.data.float()
    work = {n: block.get_submodule(n).weight.data.float() for n in linears(block)}
    query = work["self_attn.q_proj"].clone()
    place = Fold("input_layernorm", tuple(groups[0].members))
    fold(block, place, torch.rand(64) + 0.37, work)
    effective = norm.weight.data.float() * work["self_attn.q_proj"]
    torch.testing.assert_close(effective, old * query, rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_a_scale_that_would_change_the_function_is_refused(make_checkpoint):
    """q_proj has the shape of a producer of o_proj, gate_proj that of down_proj; scaling them changes the block."""
    block, run = block_of(make_checkpoint("llama", dtype=torch.float32, num_key_value_heads=4))
    groups = find_groups(block, run, linears(block))
    producers = {p.producer for p in find_folds(block, groups, groups, run)}
    assert producers == {"input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.up_proj"}
