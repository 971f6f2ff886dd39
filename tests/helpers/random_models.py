"""Random Llamas of some ten thousand weights, for tests that need a model and no text of it."""

from __future__ import annotations

from typing import Any

import torch

#: In `evaluate`: random models have flat predictions, whose most likely token changes with the last bit.
UNLIMITED = {"max_kl": "none", "min_agreement": "none"}


def random_config(**changes: Any) -> Any:
    """2 layers of 4 heads and 2 key heads, hidden 64, 257 tokens, 128 positions; no token has a meaning of its own."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 128, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def random_llama(seed: int = 0, wide: bool = True, **changes: Any) -> Any:
    """A model of that configuration, in float32 and for inference.

    Its matrices are `wide`, as the usual initial weights are so small that all outputs look alike.
    """
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(random_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if wide and parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    return model


def padded_rows(length: int, padding: tuple[int, ...], vocabulary: int = 257) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids `[rows, length]`, none of them 0, and their mask: `padding` says how many tokens of each row do not count."""
    ids = torch.randint(1, vocabulary, (len(padding), length), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(length) >= torch.tensor(padding)[:, None]).to(ids.dtype)
