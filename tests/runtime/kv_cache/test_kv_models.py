"""Compressed caches of families other than Llama: hybrids, windows, layers of several shapes; and of models that nobody loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import random_config, random_llama
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

import runtime.kv_cache
from runtime.config.settings import ConfigError
from runtime.engines.torch.engine import CacheFactory
from runtime.kv_cache import CompressedCache, Policy, prepare
from runtime.kv_cache.cache import check_asked
from runtime.kv_cache.estimate import held_bytes, needed_bytes
from runtime.kv_cache.layer import CompressedLayer
from runtime.kv_cache.policy.calibrated import fingerprint
from runtime.kv_cache.shape import Shape
from runtime.modeling.cache_argument import cache_argument

_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], **_MAMBA},
    "granitemoehybrid": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 32, "position_embedding_type": "rope", **_EXPERTS, **_MAMBA,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
}  # fmt: skip
_GEMMA4 = {
    **_SMALL, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 99, "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_GEMMA3 = {
    **_SMALL, "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


def build(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A random model, in float32 and for inference."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_SMALL, **changes})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
    return model


def written(model: Any, cache: Any, prompt: torch.Tensor, count: int) -> list[int]:
    """The likeliest tokens after a prompt `[1, n]`, one step each."""
    found: list[int] = []
    ids = prompt
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            found.append(int(logits[0, -1].argmax()))
            ids = torch.tensor([found[-1:]])
    return found


PROMPT = torch.randint(1, 99, (1, 150), generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- hybrids
@pytest.mark.parametrize("family", sorted(_HYBRIDS))
def test_hybrids_are_compressed_where_they_have_attention(family: str) -> None:
    model = build(family, _HYBRIDS[family])
    plain = DynamicCache(config=model.config)
    expected = written(model, plain, PROMPT, 12)
    assert len(set(expected)) > 2
    factory = CacheFactory(model, Policy.parse({}))
    cache = factory.new()
    assert written(model, cache, PROMPT, 12) == expected
    check_asked(model, cache, 161)
    kinds = {type(layer) for layer in cache.layers}
    assert CompressedLayer in kinds
    assert any(issubclass(kind, LinearAttentionCacheLayerMixin) for kind in kinds), (
        "recurrent layers keep transformers' caches"
    )
    states = [
        state
        for layer in cache.layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
        if state is not None
    ]
    assert states
    for own, other in zip(cache.layers, plain.layers, strict=True):
        if isinstance(own, LinearAttentionCacheLayerMixin):
            assert type(own) is type(other)
            for name in ("conv_states", "recurrent_states"):
                for place, state in getattr(other, name).items():
                    torch.testing.assert_close(getattr(own, name)[place], state, atol=1e-4, rtol=1e-4)
    compressed = sum(layer.nbytes for layer in cache.layers if isinstance(layer, CompressedLayer))
    assert cache.nbytes == compressed + sum(state.untyped_storage().nbytes() for state in states)


@pytest.mark.parametrize("family", sorted(_HYBRIDS))
def test_hybrids_are_evicted_from_and_stored_in_few_bits(family: str) -> None:
    model = build(family, _HYBRIDS[family])
    policy = Policy.parse({"evict": {"score": "snapkv", "ratio": 0.5}, "keys": "int4", "values": "int4", "recent": 32})
    factory = CacheFactory(model, policy)
    cache = factory.new()
    written(model, cache, PROMPT, 4)
    (first, *_) = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    assert int(first.store.lengths.max()) < 100
    assert first.seen == 153
    assert list(factory.explain()) == [
        f"kv_cache.{index}" for index, layer in enumerate(cache.layers) if isinstance(layer, CompressedLayer)
    ]


def test_layers_with_attention_and_a_state_side_by_side_are_refused_as_that() -> None:
    for family in ("falcon_h1", "zamba2"):
        with pytest.raises(ConfigError, match="hybrid"):
            Policy.parse("kivi").check_model(AutoConfig.for_model(family))


# ---------------------------------------------------------------- who does not ask the cache
@pytest.mark.parametrize(("family", "name"), [("bloom", "BloomForCausalLM"), ("falcon", "FalconForCausalLM")])
def test_attention_of_its_own_is_refused_wherever_it_is_prepared(family: str, name: str) -> None:
    sizes = {"n_layer": 1, "n_head": 2, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=64, **sizes))
    sentence = f"{name} computes attention in a way of its own"
    with pytest.raises(ConfigError, match=sentence):
        CacheFactory(model, Policy.parse({}))
    with pytest.raises(ValueError, match=sentence):
        prepare(model)


def test_a_model_that_calls_the_interface_for_some_layers_only_is_found_by_two_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_llama()
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    CacheFactory(model, Policy.parse({}))
    layer = model.model.layers[1].self_attn

    def own(hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:2], -1, layer.head_dim)
        states = [part(hidden_states).view(shape).transpose(1, 2) for part in (layer.k_proj, layer.v_proj)]
        given[cache_argument(model)].update(*states, 1)
        return hidden_states, None

    monkeypatch.setattr(layer, "forward", own)
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        CacheFactory(model, Policy.parse({}))


# ---------------------------------------------------------------- windows, layers of several shapes
@pytest.mark.parametrize(
    ("family", "changes"), [("gemma3_text", _GEMMA3), ("gemma4_text", _GEMMA4)], ids=["gemma3", "gemma4"]
)
def test_windows_free_what_they_no_longer_see(family: str, changes: dict[str, Any]) -> None:
    model = build(family, changes)
    expected = written(model, DynamicCache(config=model.config), PROMPT, 12)
    factory = CacheFactory(model, Policy.parse({}))
    cache = factory.new()
    assert written(model, cache, PROMPT, 1) == expected[:1]
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            assert layer.keys.shape[2] == 63
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
    policy, shape = Policy.parse({}), Shape.of(model.config, torch.float32)
    assert cache.nbytes <= needed_bytes(shape, policy, 150, 1)
    assert cache.nbytes == pytest.approx(held_bytes(shape, policy, 150), rel=0.1)
    cache = factory.new()
    assert written(model, cache, PROMPT, 12) == expected
    assert cache.nbytes == pytest.approx(held_bytes(shape, policy, 150, 11), rel=0.15)


def test_layers_of_several_shapes_are_counted_and_checked_one_by_one() -> None:
    config = AutoConfig.for_model("gemma4_text", **_GEMMA4)
    shape = Shape.of(config, torch.float32)
    assert [(layer.heads, layer.sizes, layer.window) for layer in shape.layers] == [(1, (32, 32), None)] * 2
    assert [(layer.heads, layer.sizes, layer.window) for layer in shape.others] == [(2, (16, 16), 64)] * 2
    Policy.parse("kivi").check_model(config)
    assert fingerprint(config) != fingerprint(AutoConfig.for_model("gemma4_text", **{**_GEMMA4, "global_head_dim": 64}))

    def sparse(channels: list[Any]) -> Policy:
        known = {"fingerprint": fingerprint(config), "channels": channels}
        return Policy.parse({"method": "doublesparsity", "select": {"tokens": 64}, "calibrated": known})

    sparse([[[31]], [[16]]]).check_model(config)
    with pytest.raises(ConfigError, match=r"calibrated\.channels"):
        sparse([[[31]], [[32]]]).check_model(config)
    with pytest.raises(ConfigError, match=r"calibrated\.channels"):
        sparse([[[1], [1]], [[1], [1]]]).check_model(config)


# ---------------------------------------------------------------- with plain transformers
def test_what_messages_name_is_there() -> None:
    with pytest.raises(ValueError, match=r"prepare\(model\)"):
        CompressedCache(random_llama())
    assert runtime.kv_cache.prepare is prepare
    for name in runtime.kv_cache.__all__:
        assert getattr(runtime.kv_cache, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'prepair'"):
        runtime.kv_cache.prepair  # noqa: B018


def test_naming_the_package_imports_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    code = "import sys, runtime.kv_cache; assert not {'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_policy_is_checked_wherever_a_cache_is_made_of_it() -> None:
    model = random_llama(max_position_embeddings=1024)
    prepare(model)
    ids = torch.randint(1, 257, (1, 300), generator=torch.Generator().manual_seed(0))
    for written in ("snapkv", {"method": "snapkv"}):
        assert CompressedCache(model, written).layers[0].eviction is not None
    with pytest.raises(ValueError, match="unknown method"):
        CompressedCache(model, "no such method")
    cache = CompressedCache(model, Policy.parse("snapkv"))
    model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert int(cache.layers[0].store.lengths.max()) < 80

    def duo(found: str, gates: list[list[float]]) -> Policy:
        return Policy.parse({"method": "duoattention", "calibrated": {"fingerprint": found, "gates": gates}})

    own, gates = fingerprint(model.config), [[0.1, 0.9], [0.9, 0.1]]
    CompressedCache(model, duo(own, gates))
    for policy in (duo("0" * 16, gates), duo(own, gates[:1]), duo(own, [[0.1], [0.9]])):
        with pytest.raises(ConfigError) as refused:
            policy.check_model(model.config)
        with pytest.raises(ValueError, match="calibrated") as caught:
            CompressedCache(model, policy)
        assert str(caught.value) == str(refused.value)
    with pytest.raises(ValueError, match="gates"):
        CompressedCache(model, Policy.parse("duoattention"))
    known = {"fingerprint": own, "prefix_tokens": [3, 4]}
    with pytest.raises(ValueError, match=r"kv_cache\.prefix"):
        CompressedCache(model, Policy.parse({"method": "prefixquant", "calibrated": known}))
    prefixed = CacheFactory(model, Policy.parse({"method": "prefixquant", "calibrated": known}))
    assert prefixed.new().layers[0].storage.prefix == 2


def test_floats_of_another_dtype_give_the_same_with_padding_and_without() -> None:
    """A row's tokens alone, and beside a longer row, where padding has them read back from the store."""
    model = random_llama()
    prepare(model)
    policy = Policy.parse({"floats": "bfloat16"})
    ids = torch.randint(1, 257, (1, 40), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.int64), ids], 1)
    mask = (torch.arange(48) >= 8).long()[None]
    with torch.no_grad():
        alone = model(ids, past_key_values=CompressedCache(model, policy)).logits
        beside = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                       past_key_values=CompressedCache(model, policy)).logits[:, 8:]  # fmt: skip
        cache = CompressedCache(model, policy)
        pieces = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(20, 1)], 1)
        exact = model(ids, past_key_values=CompressedCache(model)).logits
    torch.testing.assert_close(alone, beside, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(alone, pieces, atol=1e-4, rtol=1e-4)
    assert (alone - exact).abs().max() > 1e-3, "bfloat16 can be told from float32"


def test_random_configs_of_one_shape_have_one_fingerprint_whatever_their_weights() -> None:
    assert fingerprint(random_config()) == fingerprint(random_llama(seed=3).config)


def test_a_config_of_a_transformers_that_knows_no_layers_apart() -> None:
    from runtime.kv_cache.shape import layer_configs

    config = SimpleNamespace(num_hidden_layers=3, head_dim=16)
    assert layer_configs(config) == [config] * 3
    known = random_llama().config
    assert [part.head_dim for part in layer_configs(known)] == [known.head_dim] * known.num_hidden_layers
