"""Tokenizer with one token a byte."""

from __future__ import annotations

from typing import Any


def plain_byte_tokenizer() -> Any:
    """One token a byte, and one for the end of a text: 257 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(letters)}, "<|endoftext|>": 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
