"""Smaller vocabulary: tokens that can go while every text can still be written, and the tokenizer without them.

Only what `tokenizer.json` holds is known here: the three kinds of subword models (`KINDS`), each a file that says what its tokens are made
of and what it looks like with fewer of them.
"""

from __future__ import annotations

from compress.prune.structure.vocabulary.choose_tokens import choose, closed, kept_tokens
from compress.prune.structure.vocabulary.tokens import Tokens
from compress.prune.structure.vocabulary.vocabulary import Vocabulary, read_vocabulary

__all__ = ["Tokens", "Vocabulary", "choose", "closed", "kept_tokens", "read_vocabulary"]
