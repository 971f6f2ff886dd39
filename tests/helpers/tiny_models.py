"""Tiny random checkpoints and a tiny tokenizer for the runtime's tests. No downloads."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CORPUS = [
    "Once upon a time there was a small cat. The cat sat on the mat and looked at the moon.",
    "def add(a, b):\n    return a + b\n\nclass Cat:\n    def meow(self):\n        print('meow')\n",
    "Grüße aus Köln, naïve café; 東京の夜; emoji 🙂🚀 and more 🙂 text.",
] * 3


@functools.cache
def tokenizer() -> Any:
    """Byte-level BPE with 400 entries: few merges, so that most non-ASCII characters are spread over several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def llama(**changes: Any) -> Any:
    """A random Llama whose greedy output varies (the usual initial weights are so small that it would repeat one token)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    arguments = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": 128, "initializer_range": 0.5,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**arguments, **changes})).eval()


def gpt2(**changes: Any) -> Any:
    """A random GPT-2: learned absolute positions, Conv1D layers, biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    arguments = {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 400, "n_positions": 128, "initializer_range": 0.3,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**arguments, **changes})).eval()


def save(model: Any, path: Path, with_tokenizer: bool = True, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    if with_tokenizer:
        tokenizer().save_pretrained(path)
    return path


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """A directory with config.json and one model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    save_file(tensors, path / "model.safetensors")
    return path
