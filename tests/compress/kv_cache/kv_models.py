"""Tiny random models for the tests of cache calibration."""

from __future__ import annotations

from typing import Any

import torch
from random_models import random_llama
from transformers import LlamaForCausalLM

VOCABULARY = 64


def llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama in float32: 2 layers, 4 heads of 16, 2 key heads, frozen."""
    settings: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": VOCABULARY, "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }  # fmt: skip
    return random_llama(**{**settings, **changes}).requires_grad_(False)


def rows(count: int = 6, length: int = 48, low: int = 0) -> torch.Tensor:
    """Random rows of token ids from `low` on, `[count, length]`."""
    return torch.randint(low, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
