"""Channels by layer: widths that are given, or found by the errors that layers make, and what comes after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer
from encoder_models import bert, save, t5
from random_models import UNLIMITED
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import compress
import runtime
from compress.prune.structure.stage import units_after
from export import export
from export.gguf import families
from export.huggingface.target import HuggingFaceOptions, HuggingFaceTarget
from export.source import Source
from runtime.errors import RequestError
from runtime.modeling.skeleton import build_skeleton, read_config

WIDTHS = [96, 40, 64]


def cut(keep: Any = None, method: str = "wanda", **fields: Any) -> dict[str, Any]:
    return {"structure": {"method": method, "remove": "ffn", **({} if keep is None else {"keep": keep}), **fields}}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def widths(path: Path) -> list[int]:
    model: Any = build_skeleton(read_config(path), torch.float32)
    return [layer.mlp.up_proj.out_features for layer in model.model.layers]


@pytest.mark.parametrize("method", ["prefix", "obs"])
def test_each_layer_keeps_what_it_is_told(make_checkpoint: Any, recipe: Any, tmp_path: Path, method: str) -> None:
    source = make_checkpoint(dtype=torch.float32)
    made = compress.apply(recipe(source, cut(WIDTHS, method, reconstruct=False)), output=tmp_path / "out", quiet=True)
    before, after = tensors(source), tensors(made.path)
    model: Any = build_skeleton(read_config(source), torch.float32)
    model.load_state_dict(before, strict=False, assign=True)
    for layer, width in enumerate(WIDTHS):
        name = f"model.layers.{layer}.mlp"
        rows = after[f"{name}.up_proj.weight"]
        kept = [
            next(i for i, row in enumerate(before[f"{name}.up_proj.weight"]) if torch.equal(row, own)) for own in rows
        ]
        assert len(kept) == width
        assert method != "prefix" or kept == list(range(width))
        assert torch.equal(after[f"{name}.down_proj.weight"], before[f"{name}.down_proj.weight"][:, kept])
        gone = [i for i in range(96) if i not in kept]
        model.model.layers[layer].mlp.down_proj.weight.data[:, gone] = 0
    facts = json.loads((made.path / "config.json").read_text())
    assert facts["intermediate_size"] == 96
    assert facts["per_layer_config"] == {"1": {"intermediate_size": 40}, "2": {"intermediate_size": 64}}
    told = made.manifest["passes"][0]
    assert told["widths"] == WIDTHS
    assert told["after"] == 66.7
    assert units_after(told) == "40 to 96"
    page = (made.path / "report.html").read_text()
    assert "40 to 96" in page
    assert page.count('class="right meter"') >= 3
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(runtime.load(made.path).logits(ids), expected, rtol=1e-4, atol=1e-4)


def test_a_narrow_one_drafts_for_the_whole(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint(dtype=torch.float32)
    made = compress.apply(recipe(source, cut(WIDTHS, "prefix", reconstruct=False)), output=tmp_path / "out", quiet=True)
    expected = runtime.load(source).generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
    model = runtime.load(source, drafter=str(made.path))
    assert model.generate([5, 6, 7], max_new_tokens=24, ignore_eos=True) == expected


def test_what_comes_after(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    """Recovery, sparsity and quantization of layers of different widths, in the engine that runs others."""
    stages = [
        cut(WIDTHS),
        {"recover": {"method": "finetune", "steps": 2, "samples": 8, "sequence_length": 16, "batch_size": 2}},
        {"prune": {"method": "magnitude", "pattern": "2:4"}},
        {"quantize": {"method": "rtn", "bits": 8, "group_size": 16}},
    ]
    text = recipe(Path())["calibration"]["data"]
    request = recipe(
        make_checkpoint(), *stages, evaluate={**UNLIMITED, "data": text, "sequence_length": 32, "samples": 4}
    )
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert widths(made.path) == WIDTHS
    model = runtime.load(made.path, device="cpu")
    plain = runtime.load(made.path, device="cpu", kernels="reference")
    assert type(model.engine) is not type(plain.engine)
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    found, expected = model.logits(ids), plain.logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert len(model.generate([5, 6, 7], max_new_tokens=5, ignore_eos=True)) == 5


@pytest.mark.parametrize(
    ("second", "after"),
    [
        ({"method": "magnitude", "remove": "layers", "keep": 2}, None),
        ({"method": "magnitude", "remove": "hidden", "keep": 32}, WIDTHS),
        ({"method": "magnitude", "remove": "heads", "keep": 1}, WIDTHS),
    ],
    ids=["layers", "hidden", "heads"],
)
def test_a_second_cut_keeps_the_widths(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, second: dict[str, Any], after: list[int] | None
) -> None:
    request = recipe(make_checkpoint(head_dim=16), cut(WIDTHS), {"structure": second})
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    if after is None:
        after = [WIDTHS[layer] for layer in made.manifest["passes"][1]["kept"][0]]
    assert widths(made.path) == after
    assert len(runtime.load(made.path).generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)) == 3


def test_a_second_cut_of_channels_is_refused(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"stages\.1\.structure.*intermediate_size"):
        compress.plan(recipe(make_checkpoint(), cut(WIDTHS), cut(ratio=0.5)))


def test_an_encoder(recipe: Any, tmp_path: Path) -> None:
    source = save(bert(), tmp_path / "model")
    model: Any = build_skeleton(read_config(source), torch.float32)
    depth, wide = model.config.num_hidden_layers, model.config.intermediate_size
    keep = [wide // 2, *[wide] * (depth - 1)]
    made = compress.apply(recipe(source, cut(keep)), output=tmp_path / "out", quiet=True)
    found = [
        layer.intermediate.dense.out_features
        for layer in build_skeleton(read_config(made.path), torch.float32).encoder.layer
    ]
    assert found == keep
    assert torch.isfinite(runtime.load(made.path).hidden_states(torch.randint(0, 200, (1, 9)))).all()


# ---------------------------------------------------------------- widths that are found
def test_layers_whose_channels_matter_more_keep_more(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint(dtype=torch.float32, num_hidden_layers=4)
    file = source / "model.safetensors"
    held = load_file(file)
    held["model.layers.1.mlp.down_proj.weight"][:, 30:] *= 1e-4  # nothing is lost with most of its channels
    save_file(held, file, metadata={"format": "pt"})
    made = compress.apply(
        recipe(source, cut(ratio=0.25, allocation="error", multiple=8)), output=tmp_path / "out", quiet=True
    )
    found = made.manifest["passes"][0]["widths"]
    assert sum(found) <= 4 * 72
    assert all(width % 8 == 0 for width in found)
    assert found[1] == 40  # the least there is: half of the mean, as a multiple
    assert min(found[0], found[2], found[3]) >= 72
    assert sum(found) >= 4 * 72 - 8
    assert widths(made.path) == found


def test_widths_are_measured_once(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, interrupted: Any, monkeypatch: Any
) -> None:
    request = recipe(make_checkpoint(), cut(ratio=0.4, allocation="error", multiple=8))
    expected = compress.apply(request, output=tmp_path / "other", quiet=True)
    output = interrupted(request, 2)
    monkeypatch.setattr("compress.prune.structure.channels.candidates", None)
    made = compress.apply(request, output=output, quiet=True, resume=True)
    assert made.manifest["passes"] == expected.manifest["passes"]
    for name, value in tensors(expected.path).items():
        assert torch.equal(value, tensors(made.path)[name])


@pytest.mark.parametrize(
    "second", [{"remove": "layers", "keep": 2}, {"remove": "hidden", "keep": 32}, {"remove": "heads", "keep": 1}]
)
def test_what_is_cut_after_widths_were_found(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, second: dict[str, Any]
) -> None:
    found = cut(ratio=0.4, allocation="error", multiple=8)
    request = recipe(make_checkpoint(head_dim=16), found, {"structure": {"method": "magnitude", **second}})
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    own = made.manifest["passes"][0]["widths"]
    assert len(set(own)) > 1
    kept = made.manifest["passes"][1]["kept"][0] if second["remove"] == "layers" else range(3)
    assert widths(made.path) == [own[layer] for layer in kept]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (cut(ratio=0.5), "differ in intermediate_size"),
        ({"recover": {"method": "matformer", "steps": 2}}, "differ in intermediate_size"),
        ({"prune": {"method": "magnitude", "pattern": "2:4"}}, "needs a width divisible by 4, the weight is 64 x 33"),
    ],
)
def test_what_cannot_follow_is_refused_before(
    make_checkpoint: Any, recipe: Any, stage: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        compress.plan(recipe(make_checkpoint(), cut(ratio=0.4, allocation="error", multiple=3), stage))


def test_layers_are_ranked_whatever_their_width(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint(dtype=torch.float32)
    file = source / "model.safetensors"
    held = load_file(file)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        held[f"model.layers.0.{name}.weight"] *= 1e-5  # it does nothing
    save_file(held, file, metadata={"format": "pt"})
    layers = {"structure": {"method": "block_influence", "remove": "layers", "keep": 2}}
    made = compress.apply(recipe(source, cut([96, 40, 64]), layers), output=tmp_path / "out", quiet=True)
    assert made.manifest["passes"][1]["kept"] == [[1, 2]]
    assert widths(made.path) == [40, 64]


def test_taylor_finds_widths(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    request = recipe(make_checkpoint(), cut(None, "taylor", ratio=0.4, allocation="error", multiple=8))
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert sum(widths(made.path)) <= 3 * 56


def test_layers_without_channels_have_none_to_give(recipe: Any, tmp_path: Path) -> None:
    """Every second layer has experts, whose channels are not cut."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0, 2], max_position_embeddings=128,
    )  # fmt: skip
    source = tmp_path / "model"
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    made = compress.apply(
        recipe(source, cut(ratio=0.25, allocation="error", multiple=8)), output=tmp_path / "out", quiet=True
    )
    facts = made.manifest["passes"][0]
    own = facts.get("widths", [72, 96, 72, 96])
    assert own[0] + own[2] == 2 * 72
    assert facts["parameters_after"] == facts["parameters_before"] - 2 * 24 * 64 * 3


# ---------------------------------------------------------------- what runs them
@pytest.mark.parametrize("policy", ["kivi", "h2o", "streamingllm", {"keys": "int4", "values": "int4", "recent": 4}])
def test_compressed_caches(make_checkpoint: Any, recipe: Any, tmp_path: Path, policy: Any) -> None:
    """As a model of one width whose channels after a layer's own are zero."""
    source = make_checkpoint(dtype=torch.float32, max_position_embeddings=512)
    made = compress.apply(recipe(source, cut(WIDTHS, "prefix", reconstruct=False)), output=tmp_path / "out", quiet=True)
    held = load_file(source / "model.safetensors")
    for layer, width in enumerate(WIDTHS):
        held[f"model.layers.{layer}.mlp.down_proj.weight"][:, width:] = 0
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    prompt = list(range(40))
    texts = [
        runtime.load(path, kv_cache=policy).generate(prompt, max_new_tokens=12, ignore_eos=True)
        for path in (source, made.path)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("ort", [False, True])
def test_onnx_carries_them(make_checkpoint: Any, recipe: Any, tmp_path: Path, ort: bool) -> None:
    made = compress.apply(
        recipe(make_checkpoint(dtype=torch.float32), cut(WIDTHS)), output=tmp_path / "out", quiet=True
    )
    folder = export(made.path, "onnx", tmp_path / "onnx", quiet=True, ort=ort).path
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    found, expected = runtime.load(folder).logits(ids), runtime.load(made.path).logits(ids)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keep": [96, 40]}, r"structure\.keep"),
        ({"keep": [96, 97, 40]}, r"structure\.keep.*97"),
        ({"keep": [96, 96, 96]}, r"structure\.keep.*96"),
        ({"keep": [96, 40, 50], "multiple": 8}, r"structure\.keep.*50.*8"),
        ({"keep": [96, 0, 50]}, r"structure\.keep"),
        ({"keep": 20, "allocation": "error"}, r"structure.*keep 20"),
        ({"keep": [2, 1, 1], "remove": "heads"}, r"structure.*keep.*heads"),
        ({"ratio": 0.5, "allocation": "error", "remove": "layers"}, r"structure.*allocation.*layers"),
        ({"keep": [96, 40, 64], "allocation": "error"}, r"structure.*allocation"),
    ],
)
def test_bad_widths_are_refused(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    stage = {"structure": {"method": "magnitude", "remove": "ffn", **fields}}
    with pytest.raises(RequestError, match=said):
        compress.plan(recipe(make_checkpoint(), stage))


@pytest.mark.parametrize("fields", [{"keep": [32, 16]}, {"ratio": 0.5, "allocation": "error", "multiple": 1}])
def test_two_stacks_are_refused(recipe: Any, tmp_path: Path, fields: dict[str, Any]) -> None:
    source = save(t5(), tmp_path / "model")
    with pytest.raises(RequestError, match="stacks"):
        compress.plan(recipe(source, cut(**fields)))


def test_targets_that_know_one_width_say_so(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    made = compress.apply(recipe(make_checkpoint(), cut(WIDTHS)), output=tmp_path / "out", quiet=True)
    source = Source(made.path)
    reason = HuggingFaceTarget().why_not(source, HuggingFaceOptions())
    assert reason is not None
    assert "its layers differ in intermediate_size, and transformers cannot build a LlamaForCausalLM so" in reason
    assert "its layers differ in intermediate_size, and llama.cpp" in str(families.why_not(source))
