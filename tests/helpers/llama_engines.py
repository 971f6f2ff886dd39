"""Random Llama-like models, each on transformers' modules and on the native engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.take_over import read_engine
from runtime.engines.torch.engine import TorchEngine

CPU = torch.device("cpu")

ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 128}

SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grouped": (LlamaForCausalLM, LlamaConfig, {}),
    "every head its own keys": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 8}),
    "one key head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "odd heads, biases": (LlamaForCausalLM, LlamaConfig, {"head_dim": 22, "num_key_value_heads": 4, "attention_bias": True}),
    "tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "intermediate_size": 97, "vocab_size": 401}),
    "llama3 rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}},
    ),
    "yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ROPE}}),
    "mistral, window": (MistralForCausalLM, MistralConfig, {"sliding_window": 40}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2, some windows": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}  # fmt: skip


def model_of(name: str, **changes: Any) -> Any:
    cls, config, own = SHAPES[name]
    arguments = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = cls(config(**{**arguments, **own, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of all ones and biases of zero would hide mistakes
            parameter.data = torch.rand_like(parameter) + 0.5
    return model


def native(model: Any) -> NativeEngine:
    """The model in C; so are its logits, where those of the modules are faster too."""
    found = read_engine(TorchEngine(model, CPU))
    assert isinstance(found, NativeEngine), found
    found.in_memory = False
    return found


def engines(model: Any) -> tuple[TorchEngine, NativeEngine]:
    lean = native(model)
    return lean.torch_engine, lean
