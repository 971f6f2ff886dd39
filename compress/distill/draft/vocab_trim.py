"""VocabTrim (arXiv 2506.22694): a draft's head keeps only the tokens that its target emits most often.

A draft spends much of its time on a head for tokens that are hardly ever proposed. Nothing is lost but acceptance of the tokens that are
left out: the target still writes them, they are only never guessed.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from compress.distill.train.data import TextRows
from compress.distill.train.teacher import Teacher
from runtime.errors import RequestError


def expected_counts(teacher: Teacher, rows: TextRows) -> torch.Tensor:
    """How often the target would emit each token at trained positions of rows, sums of its probabilities: float64 `[vocabulary]`."""
    total = torch.zeros(teacher.vocabulary, dtype=torch.float64)
    for ids, trained in rows.parts(8):
        logits = teacher.logits(ids.to(teacher.device))[trained.to(teacher.device)]
        total += torch.softmax(logits, -1).double().sum(0).cpu()
    return total


def choose(frequencies: torch.Tensor, size: int, always: Collection[int] = ()) -> torch.Tensor:
    """The tokens that are kept.

    Args:
        frequencies: `[vocabulary]`, such as of `expected_counts`.
        size: tokens to keep, at most the vocabulary. Of equally frequent ones those with the lowest ids.
        always: ids that are kept however rare (the end of a text), among the `size`.

    Returns:
        int32 `[size]`, ascending.

    Raises:
        RequestError: ids that are none.
    """
    wrong = next((token for token in always if not 0 <= token < len(frequencies)), None)
    if wrong is not None:
        raise RequestError(f"token {wrong} cannot be kept: ids are below {len(frequencies)}")
    ranked = frequencies.double().clone()
    ranked[list(always)] = torch.inf
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values.to(torch.int32)


def coverage(frequencies: torch.Tensor, kept: torch.Tensor) -> float:
    """Share of what was counted that the kept tokens are; no draft that proposes only them is accepted more often."""
    total = float(frequencies.double().sum())
    return float(frequencies.double()[kept.long()].sum()) / total if total else 0.0
