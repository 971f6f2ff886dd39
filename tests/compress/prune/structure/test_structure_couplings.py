"""Which slices of which tensors make a unit, as seen in models of many families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from compress.model.config_sizes import resized, size_of
from compress.model.couplings import Slices, changed, channels_of, layouts
from runtime.errors import RequestError
from runtime.modeling.skeleton import build_skeleton, find_stacks

COMMON = {"vocab_size": 101, "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "intermediate_size": 40, "num_key_value_heads": 2},
    "qwen3": {**COMMON, "intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {**COMMON, "intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 16},
    "phi3": {**COMMON, "intermediate_size": 40, "num_key_value_heads": 2, "pad_token_id": 0},
    "opt": {**COMMON, "ffn_dim": 40, "word_embed_proj_dim": 48},
    "gpt2": {"vocab_size": 101, "n_layer": 2, "n_embd": 48, "n_head": 4},
    "bert": {**COMMON, "intermediate_size": 40, "architectures": ["BertModel"]},
    "t5": {"vocab_size": 101, "d_model": 48, "d_ff": 40, "d_kv": 12, "num_heads": 4, "num_layers": 2},
    "falcon": {**COMMON, "ffn_hidden_size": 40, "new_decoder_architecture": False, "multi_query": False},
}


def channels(family: str, what: Any, kept: int) -> tuple[list[Any], Any]:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    whole, smaller = (build_skeleton(c, torch.float32) for c in (config, resized(config, what, kept)))
    size = size_of(config, what)
    slices = changed(whole, smaller, size.count, kept)
    name, blocks = find_stacks(whole)[0]
    found = [channels_of(whole, slices, f"{name}.{index}.", size.count) for index in range(len(blocks))]
    return found[0], size


@pytest.mark.parametrize("family", FAMILIES)
def test_a_channel_of_a_feed_forward_network(family: str) -> None:
    (found,), size = channels(family, "ffn", 24)
    assert size.count == (192 if family == "gpt2" else 40)
    tensors = {part.name.rpartition("layers.0.")[2].rpartition("h.0.")[2] or part.name: part for part in found.slices}
    assert found.columns.each == 1
    weights = [part for part in found.slices if part.name.endswith("weight")]
    gated = family in ("llama", "qwen3", "gemma2")
    assert len(weights) == (3 if gated else 2), tensors
    assert {part.each for part in found.slices} == ({1, 2} if family == "phi3" else {1})
    likeliest = next(layouts(found, size.members))
    assert [part.parts for part in likeliest.slices if part.each == 2] == ([(1, 1)] if family == "phi3" else [])


@pytest.mark.parametrize(("family", "widths"), [("llama", {24, 12}), ("qwen3", {32, 16}), ("phi3", {24, 48})])
def test_a_group_of_heads(family: str, widths: set[int]) -> None:
    (found,), size = channels(family, "heads", 1)
    assert (size.count, size.members) == (2, 2)
    assert {part.each for part in found.slices} == widths
    assert found.consumer.endswith("o_proj")
    fused = next(layouts(found, size.members))
    assert [part.parts for part in fused.slices if part.each == 48] == ([(24, 12, 12)] if family == "phi3" else [])


@pytest.mark.parametrize("family", ["gpt2", "bert", "opt"])
def test_heads_whose_width_follows_from_their_number(family: str) -> None:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    whole, smaller = (build_skeleton(c, torch.float32) for c in (config, resized(config, "heads", 2)))
    assert changed(whole, smaller, 4, 2) == []


@pytest.mark.parametrize("parts", [(), (1, 1), (3,), (2, 1)])
def test_slices_are_cut_as_they_stand(parts: tuple[int, ...]) -> None:
    each, count = sum(parts) or 2, 5
    held = Slices("w", 0, each, parts)
    names = []  # of every row: unit and place in it
    start = 0
    for part in parts or (each,):
        names += [(unit, start + place) for unit in range(count) for place in range(part)]
        start += part
    tensor = torch.tensor([[10.0 * unit + place] for unit, place in names])
    kept = torch.tensor([1, 4])
    assert held.cut(tensor, kept)[:, 0].tolist() == [10 * unit + place for unit, place in names if unit in (1, 4)]
    assert held.by_unit(tensor).tolist() == [[10 * unit + place for place in range(each)] for unit in range(count)]


def test_what_cannot_be_resized_says_so() -> None:
    config = AutoConfig.for_model("llama", **FAMILIES["llama"])
    for count in (0, 41):
        with pytest.raises(RequestError, match="1 to 40"):
            resized(config, "ffn", count)
    config.num_key_value_heads = 3
    with pytest.raises(RequestError, match="groups"):
        size_of(config, "heads")
