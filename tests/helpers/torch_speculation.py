"""Speculative decoding on transformers' modules."""

from __future__ import annotations

from typing import Any

import torch
from speculation_cases import (
    VOCABULARY,
    model_over,
    speculation,
)

from runtime.drafting.drafters.base import Drafter
from runtime.engines.torch.engine import TorchEngine

CPU = torch.device("cpu")

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gpt2": {"n_positions": 256},
    "gpt_neox": {"initializer_range": 0.2},
    "mistral": {"sliding_window": 19},
    "gemma2": {"sliding_window": 16, "head_dim": 16},  # eager attention, every other layer with a window
    "deepseek_v3": {  # keys and values of different sizes, experts
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


def module_of(family: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[family](**{**SHAPE, **FAMILIES.get(family, {}), **changes})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=changes.get("attn_implementation")).eval()
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:  # norms of all ones and biases of zero would hide mistakes
            parameter.data = torch.rand_like(parameter) + (-0.5 if name.endswith("bias") else 0.5)
    return module


def drafting(module: Any, drafter: Drafter, lengths: Any = None, **options: Any) -> Any:
    return model_over(TorchEngine(module, CPU), speculation(drafter, lengths), **options)
