"""Models whose layers differ in size: built as transformers' configs say it, and run by every engine that runs those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, T5Config

import runtime
from runtime.engines.native.take_over import take_over
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import ArtifactError
from runtime.kv_cache.shape import layer_configs
from runtime.modeling.layer_sizes import differing, overrides, uniform, with_overrides
from runtime.modeling.skeleton import build_skeleton, find_stacks, read_config

SMALL = {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDTHS = [96, 48, 160, 80]


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        **SMALL, intermediate_size=160, num_key_value_heads=2, architectures=["LlamaForCausalLM"], **more
    )


def of_widths(config: Any, key: str, widths: list[int]) -> Any:
    return with_overrides(config, {i: {key: w} for i, w in enumerate(widths)})


def padded(path: Path) -> LlamaForCausalLM:
    """A model of one width that computes what the one at `path` should, which is written there: channels after a layer's own are zero."""
    torch.manual_seed(3)
    whole = LlamaForCausalLM(llama()).eval()
    tensors = {}
    with torch.no_grad():
        for index, width in enumerate(WIDTHS):
            mlp = whole.model.layers[index].mlp
            mlp.gate_proj.weight[width:] = 0
            mlp.up_proj.weight[width:] = 0
            mlp.down_proj.weight[:, width:] = 0
    for name, value in whole.state_dict().items():
        width = WIDTHS[int(name.split(".")[2])] if ".layers." in name else 0
        if "gate_proj" in name or "up_proj" in name:
            value = value[:width]
        elif "down_proj" in name:
            value = value[:, :width]
        tensors[name] = value.contiguous()
    from safetensors.torch import save_file

    path.mkdir()
    of_widths(llama(), "intermediate_size", WIDTHS).save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return whole


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (llama(), "intermediate_size"),
        (BertConfig(**SMALL, intermediate_size=160, architectures=["BertModel"]), "intermediate_size"),
        (GPT2Config(vocab_size=90, n_embd=64, n_layer=4, n_head=4, n_inner=160, architectures=["GPT2LMHeadModel"]), "n_inner"),
    ],
    ids=["llama", "bert", "gpt2"],
)  # fmt: skip
def test_each_layer_has_its_size(config: Any, key: str, tmp_path: Path) -> None:
    of_widths(config, key, WIDTHS).save_pretrained(tmp_path)
    found = read_config(tmp_path)
    assert differing(found) == {key}
    ((_, blocks),) = find_stacks(build_skeleton(found, torch.float32))
    shapes = [{size for value in block.parameters() for size in value.shape} for block in blocks]
    assert [sorted({48, 80, 96, 160} & own) for own in shapes] == [[96], [48], [160], [80]]
    ((_, blocks),) = find_stacks(build_skeleton(uniform(found), torch.float32))
    assert all(160 in {size for value in block.parameters() for size in value.shape} for block in blocks)


def test_the_engines_compute_it(tmp_path: Path) -> None:
    whole = padded(tmp_path / "model")
    ids = torch.randint(0, 90, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = whole(ids).logits
    made = whole.generate(ids[:1], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    model = runtime.load(tmp_path / "model", device="cpu")
    assert model.generate(ids[0].tolist(), max_new_tokens=12, ignore_eos=True) == made[0, 17:].tolist()
    plain = TorchEngine(model.engine.module, torch.device("cpu"))
    lean = take_over(plain)
    assert lean is not None
    for engine in (plain, lean):
        torch.testing.assert_close(engine.logits(ids), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"9": {"intermediate_size": 3}}, "layer indices|layers"),
        ({"0": {"skip": ["mlp"]}}, "skip"),
        ({"one": {"intermediate_size": 3}}, "one"),
        ([1, 2], "config.json"),
    ],
)
def test_what_cannot_be_built_is_said(given: Any, said: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"per_layer_config": given}))
    with pytest.raises(ArtifactError, match=said):
        build_skeleton(read_config(tmp_path), torch.float32)


def test_two_stacks_are_refused(tmp_path: Path) -> None:
    named = ["T5ForConditionalGeneration"]
    config = T5Config(vocab_size=90, d_model=64, d_ff=160, num_layers=2, num_heads=4, architectures=named)
    with_overrides(config, {0: {"d_ff": 32}}).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="two stacks"):
        build_skeleton(read_config(tmp_path), torch.float32)


def test_a_transformers_that_does_not_know_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.20 or so a config holds it as any other of its fields."""
    config = of_widths(llama(), "intermediate_size", WIDTHS)
    assert overrides(config) == {i: {"intermediate_size": w} for i, w in enumerate(WIDTHS) if w != 160}
    plain = llama()
    monkeypatch.setattr("runtime.modeling.layer_sizes.KEY", "sizes_of_layers")
    plain.sizes_of_layers = {"1": {"intermediate_size": 32}}
    ((_, blocks),) = find_stacks(build_skeleton(plain, torch.float32))
    assert [block.mlp.up_proj.out_features for block in blocks] == [160, 32, 160, 160]
    assert not overrides(uniform(plain))


def test_a_cache_of_a_transformers_that_does_not_know_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("runtime.modeling.layer_sizes", "runtime.kv_cache.shape"):
        monkeypatch.setattr(f"{module}.KEY", "sizes_of_layers")
    plain = llama()
    plain.sizes_of_layers = {"1": {"num_key_value_heads": 1}}
    assert [part.num_key_value_heads for part in layer_configs(plain)] == [2, 1, 2, 2]
