"""Evaluation rows with the characters that each token covers, so that models with different tokenizers can be compared on one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compress.data.held_out import Text, evaluation_texts, mixed
from compress.data.rows import balanced, row_limit, windows
from compress.data.tokens import check_vocabulary, encode, special
from compress.recipe.models import CalibrationConfig, EvaluateConfig


@dataclass(frozen=True)
class Spans:
    """Windows of running text.

    Attributes:
        ids: int64 `[n, s]`.
        characters: int64 `[n, s]`: of the text, that a token is the first to reach the end of: 0 for marks, and where bytes of a character
            are tokens for all but the first.
        parts: rows of each text, in order.
        where, kind: of the texts; see `compress.data.held_out.Text`.
    """

    ids: torch.Tensor
    characters: torch.Tensor
    parts: tuple[int, ...]
    where: str
    kind: str


def evaluation_spans(
    config: EvaluateConfig, tokenizer: Any, vocab_size: int, calibration: CalibrationConfig, like: Spans | None = None
) -> Spans:
    """The rows that `load_evaluation` gives.

    Args:
        tokenizer: a fast one, which knows where its tokens are.
        like: the rows of another tokenizer, in the place of the section's `samples`: of each text as many rows as end within its
            characters there, at least one.

    Raises:
        RequestError: as `load_evaluation`.
    """
    texts = evaluation_texts(config, calibration, tokenizer)
    if like is None:
        limits = [row_limit(config, text) for text in texts]
        read = [
            _read(text, tokenizer, config.sequence_length, None if limit is None else limit * config.sequence_length)
            for text, limit in zip(texts, limits, strict=True)
        ]
        most = [
            len(ids) if limit is None else min(limit, len(ids)) for (ids, _), limit in zip(read, limits, strict=True)
        ]
        counts = balanced(config.samples, texts, most)
    else:
        sizes = [int(part.sum()) for part in like.characters.split(like.parts)]
        read = [
            _read(text, tokenizer, config.sequence_length, None, size) for text, size in zip(texts, sizes, strict=True)
        ]
        counts = [
            max(1, int((spans.sum(1).cumsum(0) <= size).sum())) for (_, spans), size in zip(read, sizes, strict=True)
        ]
    parts = [(ids[:count], spans[:count]) for (ids, spans), count in zip(read, counts, strict=True)]
    for (ids, _), text in zip(parts, texts, strict=True):
        check_vocabulary(ids, vocab_size, text.named, text.where)
    rows, characters = (torch.cat(part) for part in zip(*parts, strict=True))
    return Spans(rows, characters, tuple(len(ids) for ids, _ in parts), *mixed(texts))


def _read(
    text: Text, tokenizer: Any, length: int, tokens: int | None, characters: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their characters, each int64 `[n, length]`, of a text until so many are read."""
    ids: list[int] = []
    ends: list[int] = []
    total = 0
    for one in text.documents:
        for encoded in encode([one], tokenizer, separate=True):
            ids += encoded
            ends += _characters(one, tokenizer, len(encoded))
            total += len(one)
        if (tokens is not None and len(ids) >= tokens) or (characters is not None and total >= characters):
            break
    rows = windows(torch.tensor(ids, dtype=torch.int64), length, text)
    return rows, torch.tensor(ends[: rows.numel()]).view(rows.shape)


def _characters(text: str, tokenizer: Any, count: int) -> Iterator[int]:
    """Characters that end with each of the `count` tokens of a text, the last of which may be a mark that was put behind it."""
    offsets = tokenizer(text, verbose=False, add_special_tokens=special(text), return_offsets_mapping=True)[
        "offset_mapping"
    ]
    seen = 0
    for _, end in [*offsets, *([(0, 0)] * (count - len(offsets)))]:
        yield max(0, end - seen)
        seen = max(seen, end)
