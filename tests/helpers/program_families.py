"""Tiny random models of many families, with what is odd about each switched on, dense or of compressed layers."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
import transformers
from compressed_models import SCHEMES, nearest, random_basis
from torch import nn

from runtime import formats
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import GridScheme, Scheme
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.linear_modules import get_matrix, is_conv1d, is_matrix
from runtime.modeling.skeleton import find_blocks

SIZES = {
    "hidden_size": 72, "intermediate_size": 101, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": 307, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT = {"n_embd": 72, "n_layer": 2, "n_head": 6, "n_positions": 256, "n_inner": 101}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

#: Family, and after a comma what is odd: changes of its config. "layers" is their number where two would not show it.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {"head_dim": 20},
    "Gemma": {"head_dim": 20},
    "Gemma2": {"head_dim": 20, "query_pre_attn_scalar": 17, "sliding_window": 9,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
    "Gemma3": {
        "head_dim": 20, "query_pre_attn_scalar": 17, "sliding_window": 9, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Phi3": {"rope_parameters": _PARTIAL, "sliding_window": 9},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "Granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
        "attention_bias": True},
    "Glm": {"head_dim": 12, "attention_bias": True},
    "Glm4": {"head_dim": 16, "attention_bias": True, "rope_parameters": _PARTIAL},
    "StableLm": {"rope_parameters": _PARTIAL, "use_qkv_bias": True},
    "StableLm, parallel, norms of heads": {"rope_parameters": _PARTIAL, "use_parallel_residual": True, "qk_layernorm": True},
    "Cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "Cohere2": {"sliding_window": 9, "logit_scale": 0.3, "layer_types": ["sliding_attention", "full_attention"]},
    "Starcoder2": {"sliding_window": 9, "use_bias": True},
    "GPT2": _GPT,
    "GPT2, scales of layers": _GPT | {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
    "GPTNeoX": {"rotary_pct": 0.25, "hidden_size": 96},
    "GPTNeoX, one after the other": {"rotary_pct": 0.5, "hidden_size": 96, "use_parallel_residual": False},
    "OPT": {"ffn_dim": 101, "word_embed_proj_dim": 72},
    "OPT, norms last": {"ffn_dim": 101, "word_embed_proj_dim": 72, "do_layer_norm_before": False},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "Falcon, one norm": {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    "Falcon, one key": {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    "Falcon, one after the other": {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False},
    "Nemotron": {},
    "Phi": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Mixtral": {"intermediate_size": 104, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 20, "mlp_only_layers": [0]},
    "GraniteMoe": {
        "intermediate_size": 104, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1, "logits_scaling": 8.0,
    },
    "GptOss": {"intermediate_size": 104, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 20, "sliding_window": 9},
    "DeepseekV3": {
        "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8,
    },
}  # fmt: skip


def model_of(name: str, **changes: Any) -> Any:
    """A random model in float32; norms and biases are random too."""
    family = name.split(",")[0]
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    cls = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    made = config(**{**SIZES, **FAMILIES.get(name, {}), **changes})
    made._attn_implementation = "eager" if family in ("Gemma2", "GptOss") else "sdpa"
    torch.manual_seed(0)
    model = cls(made).eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in key:
            parameter.data = torch.rand_like(parameter) * 0.5 + (0.0 if key.endswith("bias") else 0.75)
    return model


FLOAT8 = Scheme(GridScheme(8, "float", strategy="channel"))


def compressed(model: Any, scheme: Scheme = SCHEMES["pack-quantized"]) -> tuple[Any, Any]:
    """The model with layers of the scheme (by default 4 bits) in its blocks, and with the same weights dense."""
    small, dense = copy.deepcopy(model), copy.deepcopy(model)
    blocks, grid = find_blocks(model)[0], scheme.weights
    assert grid is not None
    for name, module in model.named_modules():
        if not is_matrix(module) or not name.startswith(f"{blocks}."):
            continue
        given, turned = get_matrix(module).detach().contiguous(), scheme.transform
        basis = {} if turned is None else random_basis(turned, given.shape[1], name.rpartition(".")[0])
        weight = nearest(given if turned is None else turned.to_weight(given, basis), scheme)
        shape = weight.shape
        plain = type(grid) is GridScheme and grid.type == "int"
        form = formats.get("packed") if plain else formats.choose(scheme, shape)
        bias = None if module.bias is None else module.bias.detach()
        tensors = form.pack(weight) | basis
        entry = ModuleEntry(scheme, form.name, form.stored_count(tensors))
        if (
            scheme.activations is not None
        ):  # calibrated numbers: the same for layers of one input, others for every expert
            scale = 0.05 + zlib.crc32(name.rpartition(".")[0].encode()) % 8 / 80
            tensors |= {
                k: torch.full(spec.shape, scale, dtype=spec.dtype)
                for k, spec in scheme.activations.tensors(torch.float32).items()
            }
        layer = CompressedLinear.from_tensors(entry, shape, tensors, bias, torch.float32)
        layer.prepare()
        small.set_submodule(name, layer)
        twin = dense.get_submodule(name)
        plain_weight = layer.dequantize()
        twin.weight = nn.Parameter(plain_weight.T.contiguous() if is_conv1d(module) else plain_weight)
    return small, dense
