"""Smaller vocabulary: tokens that can go while every text can still be written, and the tokenizer without them.

The tokenizer is read from `tokenizer.json`; its subword model is one of three kinds.
"""

from __future__ import annotations

from compress.prune.structure.vocabulary.tokens import Tokens, choose, closed, kept_tokens
from compress.prune.structure.vocabulary.vocabulary import Vocabulary, read_vocabulary

__all__ = ["Tokens", "Vocabulary", "choose", "closed", "kept_tokens", "read_vocabulary"]
