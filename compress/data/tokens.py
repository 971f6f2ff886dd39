"""Documents to token ids, the way the tokenizer would feed them to the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from compress.data.chat import Conversation
from compress.recipe.models import TextSet
from runtime.errors import RequestError


def encode(texts: Iterable[str], tokenizer: Any, separate: bool) -> Iterator[list[int]]:
    """Token ids of each document that is not blank.

    Args:
        texts: the documents.
        tokenizer: a Hugging Face tokenizer; its own special tokens (BOS of Llama, say) are added as it does, but to conversations, which
            have them.
        separate: append the end-of-text token where the tokenizer marks neither start nor end by itself, so that
            documents laid end to end stay apart.
    """
    marks = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    for text in texts:
        if not text.strip():
            continue
        # verbose=False: rows are cut afterwards, so "longer than the maximum" is nothing to warn about.
        plain = special(text)
        ids: list[int] = tokenizer(text, verbose=False, add_special_tokens=plain)["input_ids"]
        if not ids:
            continue
        if separate and plain and tokenizer.eos_token_id is not None and not marks & {ids[0], ids[-1]}:
            ids = [*ids, tokenizer.eos_token_id]
        yield ids


def special(text: str) -> bool:
    """Whether the tokenizer's special tokens are added to a document; chat templates have written those of a conversation."""
    return not isinstance(text, Conversation)


def end_of_text(tokenizer: Any) -> str | None:
    """The end-of-text token as a text file may spell it out; None for short ones, such as `</s>`, an HTML tag."""
    token = tokenizer.eos_token
    return token if isinstance(token, str) and len(token) >= 8 else None


def check_vocabulary(ids: torch.Tensor, vocab_size: int, source: TextSet, what: str) -> None:
    """Raise `RequestError` when an id is outside `[0, vocab_size)`: the tokenizer belongs to another model."""
    if ids.numel() and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        wrong = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
        text = f"{what} gives token id {wrong}, but the model's vocabulary has {vocab_size} entries; use its tokenizer"
        raise RequestError(source.at("data", text))
