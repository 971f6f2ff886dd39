"""Smaller vocabulary: tokens that can go while every text can still be written, and the tokenizer without them.

The tokenizer is read from `tokenizer.json`; its subword model is one of three kinds (`subword_models`).
"""

from __future__ import annotations

from compress.prune.structure.vocabulary.choose_tokens import choose, closed, kept_tokens
from compress.prune.structure.vocabulary.tokens import Tokens
from compress.prune.structure.vocabulary.vocabulary import Vocabulary, read_vocabulary

__all__ = ["Tokens", "Vocabulary", "choose", "closed", "kept_tokens", "read_vocabulary"]
