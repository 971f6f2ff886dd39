"""Tiny random models for the tests of cache calibration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama in float32: 2 layers, 4 heads of 16, 2 key heads, frozen."""
    settings: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "initializer_range": 0.3,
        "tie_word_embeddings": True, "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval().requires_grad_(False)


def rows(count: int = 6, length: int = 48, low: int = 0) -> torch.Tensor:
    """Random rows of token ids from `low` on, `[count, length]`."""
    return torch.randint(low, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
