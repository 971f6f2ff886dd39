"""Evaluation rows with the characters that each token covers, so that models with different tokenizers can be compared on one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compress.data.held_out import evaluation_text
from compress.data.rows import row_limit, windows
from compress.data.tokens import check_vocabulary, encode
from compress.recipe.models import CalibrationConfig, EvaluateConfig


@dataclass(frozen=True)
class Spans:
    """Windows of running text.

    Attributes:
        ids: int64 `[n, s]`.
        characters: int64 `[n, s]`: of the text, that a token is the first to reach the end of: 0 for marks, and where bytes of a character
            are tokens for all but the first.
        where, kind: see `compress.data.held_out.Text`.
    """

    ids: torch.Tensor
    characters: torch.Tensor
    where: str
    kind: str


def evaluation_spans(
    config: EvaluateConfig,
    tokenizer: Any,
    vocab_size: int,
    calibration: CalibrationConfig,
    characters: int | None = None,
) -> Spans:
    """The rows that `load_evaluation` gives.

    Args:
        tokenizer: a fast one, which knows where its tokens are.
        characters: of the text that are wanted, in the place of the section's `samples`: as many rows as end within them, at least one.

    Raises:
        RequestError: as `load_evaluation`.
    """
    length = config.sequence_length
    found = evaluation_text(config, calibration, tokenizer)
    count = row_limit(config, found)
    wanted = None if count is None or characters is not None else count * length
    ids: list[int] = []
    ends: list[int] = []
    total = 0
    for text in found.documents:
        for encoded in encode([text], tokenizer, separate=True):
            ids += encoded
            ends += _characters(text, tokenizer, len(encoded))
            total += len(text)
        if (wanted is not None and len(ids) >= wanted) or (characters is not None and total >= characters):
            break
    rows = windows(torch.tensor(ids, dtype=torch.int64), length, found)
    spans = torch.tensor(ends[: rows.numel()]).view(rows.shape)
    if characters is not None:
        count = max(1, int((spans.sum(1).cumsum(0) <= characters).sum()))
    check_vocabulary(rows[:count], vocab_size, found.named, found.where)
    return Spans(rows[:count], spans[:count], found.where, found.kind)


def _characters(text: str, tokenizer: Any, count: int) -> Iterator[int]:
    """Characters that end with each of the `count` tokens of a text, the last of which may be a mark that was put behind it."""
    offsets = tokenizer(text, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    seen = 0
    for _, end in [*offsets, *([(0, 0)] * (count - len(offsets)))]:
        yield max(0, end - seen)
        seen = max(seen, end)
