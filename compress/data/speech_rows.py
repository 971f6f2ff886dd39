"""Rows of integers that hold a sound and its transcript, so that they are batched, hashed and stored like rows of token ids.

A row is [a, b, prefix], then the bits of the a x b float32 features of the sound, then the tokens of the transcript. The first `prefix`
of these are given and not scored (language, task); `NOTHING` fills rows up behind the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

NOTHING = -1
_HEADER = 3


def pack(features: torch.Tensor, prefix: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """A row, int64 `[n]`, of features, float32 `[a, b]`, and the tokens after the start token."""
    header = torch.tensor([*features.shape, len(prefix)])
    bits = features.contiguous().view(torch.int32).flatten().long()
    return torch.cat([header, bits, torch.tensor([*prefix, *tokens], dtype=torch.int64)])


def together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of equally large sounds as int64 `[rows, n]`."""
    return pad_sequence(list(rows), batch_first=True, padding_value=NOTHING)


def size(rows: torch.Tensor) -> tuple[int, int]:
    """The shape `(a, b)` of the features of rows `[rows, n]`."""
    return int(rows[0, 0]), int(rows[0, 1])


def features(rows: torch.Tensor) -> torch.Tensor:
    """Float32 `[rows, a, b]`."""
    a, b = size(rows)
    return rows[:, _HEADER : _HEADER + a * b].int().view(torch.float32).reshape(-1, a, b)


def transcript(rows: torch.Tensor) -> torch.Tensor:
    """Token ids, int64 `[rows, t]`, `NOTHING` behind the last."""
    a, b = size(rows)
    return rows[:, _HEADER + a * b :]


def scored(rows: torch.Tensor) -> torch.Tensor:
    """As `transcript`, with `NOTHING` in place of the given prefix too."""
    tokens = transcript(rows).clone()
    given = rows[:, 2, None]
    return tokens.masked_fill_(torch.arange(tokens.shape[1]) < given, NOTHING)
