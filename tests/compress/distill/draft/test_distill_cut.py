"""Drafts cut out of targets: the same numbers as the target with its other layers taken out, whatever its family and storage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_llama
from torch import nn

import runtime
from compress.distill.draft.cut import cut, cut_checkpoint, spread
from runtime.errors import ArtifactError, RequestError

IDS = torch.randint(1, 257, (2, 12), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 257, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "head_dim": 16,
}  # fmt: skip


def family(name: str, **changes: Any) -> Any:
    import transformers

    settings = {**SIZES, **changes}
    if name == "GPT2":
        settings = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 257, "n_positions": 64, **changes}
        settings |= {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, head)(getattr(transformers, f"{name}Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def without_layers(model: Any, kept: list[int]) -> torch.Tensor:
    """Logits of the model with only these layers, by taking the others out of its list."""
    other = copy.deepcopy(model)
    body = other.get_decoder()
    name = "h" if hasattr(body, "h") else "layers"
    setattr(body, name, nn.ModuleList([getattr(body, name)[index] for index in kept]))
    other.config.num_hidden_layers = len(kept)
    if getattr(other.config, "layer_types", None):
        other.config.layer_types = [other.config.layer_types[index] for index in kept]
    with torch.no_grad():
        logits: torch.Tensor = other(input_ids=IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("kept", [[0], [0, 1], [0, 3], [1, 2, 3]])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 5}),
        ("GPT2", {}),
    ],
)
def test_a_cut_computes_as_the_target_without_its_other_layers(
    name: str, changes: dict[str, Any], kept: list[int]
) -> None:
    model = family(name, **changes)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    draft = cut(model, kept)
    with torch.no_grad():
        logits = draft(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits, without_layers(model, kept), atol=1e-5, rtol=1e-5)
    assert draft.config.num_hidden_layers == len(kept)
    assert len(getattr(draft.config, "layer_types", None) or kept) == len(kept)
    assert model.config.num_hidden_layers == 4
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tied_stays_tied_and_copies_are_copies() -> None:
    model = family("Llama", tie_word_embeddings=True)
    draft = cut(model, range(2))
    assert draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    assert all(parameter.requires_grad for parameter in draft.parameters())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
    assert all(bool(parameter.detach().any()) for parameter in model.parameters())
    untied = cut(family("Llama"), range(2))
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight


def test_the_first_layers_and_their_training() -> None:
    draft = cut(family("Llama").to(torch.bfloat16), range(2))
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}
    draft(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())


def test_an_artifact_gives_its_dequantized_weights(tiny_artifact: Path) -> None:
    loaded = runtime.load(tiny_artifact, kernels="reference", dtype="float32")
    draft = cut_checkpoint(tiny_artifact, range(2))  # all its layers: what it computes is the artifact itself
    assert not any("CompressedLinear" in type(module).__name__ for module in draft.modules())
    assert not hasattr(draft.config, "quantization_config")
    with torch.no_grad():
        logits = draft(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits, loaded.logits(IDS), atol=1e-4, rtol=1e-4)
    one = cut_checkpoint(tiny_artifact, [1])
    module = loaded.engine.module.model.layers[1].mlp.down_proj
    torch.testing.assert_close(one.model.layers[0].mlp.down_proj.weight, module.dequantize().float())
    same = cut(loaded.engine.module, [1])
    with torch.no_grad():
        torch.testing.assert_close(one(input_ids=IDS).logits, same(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)


def test_compressed_layers_that_are_stored_transposed() -> None:
    """GPT-2's Conv1D is `[in, out]`, the compressed layer in its place `[out, in]`."""
    from runtime import formats
    from runtime.formats.quantization_config import ModuleEntry
    from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme
    from runtime.layers.compressed_linear import CompressedLinear

    model, twin = family("GPT2"), family("GPT2")
    scheme = Scheme(GridScheme(8, strategy="channel"))
    storage = formats.choose(scheme, (64, 64))
    for name, module in list(model.named_modules()):
        if type(module).__name__ != "Conv1D":
            continue
        weight = module.weight.data.T.contiguous()
        scale = weight.abs().amax(1, keepdim=True) / 127
        solved = CompressedWeight((weight / scale).round().to(torch.int8), scale, None, None, scheme, torch.float32)
        entry = ModuleEntry(scheme, storage.name)
        shape = (weight.shape[0], weight.shape[1])
        packed = CompressedLinear.from_tensors(entry, shape, storage.pack(solved), module.bias.data, torch.float32)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, packed)
        twin.get_submodule(name).weight.data.copy_(solved.dequantize().T)
    draft = cut(model, [0, 2])
    with torch.no_grad():
        logits = draft(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits, without_layers(twin, [0, 2]), atol=1e-5, rtol=1e-5)


def test_only_the_layers_that_are_kept_are_read(
    tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.checkpoint.checkpoint import Checkpoint

    read: list[str] = []
    get = Checkpoint.get

    def counting(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(Checkpoint, "get", counting)
    draft = cut_checkpoint(tiny_llama(), [1])
    assert any("layers.1." in name for name in read)
    assert not any("layers.0." in name for name in read)
    whole = runtime.load(tiny_llama(), dtype="float32").engine.module
    torch.testing.assert_close(draft.model.layers[0].mlp.up_proj.weight, whole.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("layers", [[], [1, 0], [0, 0], [0, 2], [-1], [0.5]])
def test_layers_that_are_not_there_are_refused(layers: Any) -> None:
    with pytest.raises(RequestError, match="0 to 1"):
        cut(random_llama(), layers)


def test_models_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    with pytest.raises(RequestError, match="scale_attn_by_inverse_layer_idx"):
        cut(family("GPT2", scale_attn_by_inverse_layer_idx=True), range(1))
    bert = BertForMaskedLM(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    )
    with pytest.raises(RequestError, match="encoder"):
        cut(bert, range(1))
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(RequestError, match="encoder"):
        cut_checkpoint(tmp_path / "bert", range(1))
    with pytest.raises(ArtifactError):
        cut_checkpoint(tmp_path / "missing", range(1))
    model = family("Llama")
    model.config.num_hidden_layers = 3
    with pytest.raises(RequestError, match=r"4 .*model\.layers.*num_hidden_layers.* 3"):
        cut(model, range(1))


def test_layers_are_spread_with_the_first_and_the_last() -> None:
    assert spread(4, 1) == [0]
    assert spread(4, 2) == [0, 3]
    assert spread(32, 4) == [0, 10, 21, 31]
    for depth in range(1, 20):
        for count in range(1, depth + 1):
            layers = spread(depth, count)
            assert layers == sorted(set(layers))
            assert len(layers) == count
            assert layers[-1] < depth
    with pytest.raises(RequestError, match="1 to 4"):
        spread(4, 5)
