"""Kinds of calibration rows: running text, a source with its target, a sound with its transcript."""

from __future__ import annotations

from typing import Any

import torch

from compress.data import speech_rows
from runtime.modeling.skeleton import FEATURES


class TextRows:
    """Rows `[n, s]` of token ids, all of which the model reads.

    Attributes:
        name: what the (first) stack calls its input.
    """

    name = "input_ids"

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        """What the (first) stack reads."""
        return rows

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        """What the decoder of an encoder-decoder reads, int64 `[n, t]`, beginning with the start token."""
        raise NotImplementedError("a model of one stack has no target")

    def labels(self, rows: torch.Tensor) -> torch.Tensor:
        """The tokens that all but the last of a row's logits predict; negative where a logit is not scored."""
        return rows[:, 1:]

    def shape(self, rows: torch.Tensor) -> tuple[Any, ...]:
        """Equal for rows on which blocks are called alike, but for the mask."""
        return tuple(rows.shape)

    def encoded(self, rows: torch.Tensor) -> int | None:
        """Positions that the (first) stack gives for a row; None: only a run shows."""
        return int(self.source(rows).shape[1])

    def positions(self, rows: torch.Tensor) -> tuple[int, int]:
        """Rows, and positions of the hidden states of one, at most."""
        return len(rows), int(rows.shape[1])

    def length(self, rows: torch.Tensor) -> int:
        """Tokens of a row, in words of the user."""
        return int(rows.shape[1])


class HalvedRows(TextRows):
    """Rows of token ids whose first half is the source of an encoder-decoder; its decoder reads the rest."""

    def __init__(self, start: int) -> None:
        self.start = start

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : self._half(rows)]

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        return _begun(self.start, self.labels(rows))

    def labels(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, self._half(rows) :]

    def _half(self, rows: torch.Tensor) -> int:
        return max(1, rows.shape[1] // 2)


class SpeechRows(TextRows):
    """Rows that hold the features of a sound and its transcript (`compress.data.speech_rows`).

    Args:
        start: the token that a decoder begins with. window: positions of the encoder at most; None: as many as features.
    """

    name = FEATURES

    def __init__(self, start: int, window: int | None) -> None:
        self.start, self._window = start, window

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        return speech_rows.features(rows)

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        tokens = speech_rows.transcript(rows)
        # A decoder looks back only, so what stands behind the last token does not matter.
        return _begun(self.start, tokens.masked_fill(tokens == speech_rows.NOTHING, self.start))

    def labels(self, rows: torch.Tensor) -> torch.Tensor:
        return speech_rows.scored(rows)

    def shape(self, rows: torch.Tensor) -> tuple[Any, ...]:
        return (*rows.shape, *speech_rows.size(rows))

    def encoded(self, rows: torch.Tensor) -> int | None:
        return None

    def positions(self, rows: torch.Tensor) -> tuple[int, int]:
        frames = max(speech_rows.size(rows))
        return len(rows), min(frames, self._window or frames) + self.length(rows) + 1

    def length(self, rows: torch.Tensor) -> int:
        return int(speech_rows.transcript(rows).shape[1])


def _begun(start: int, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((len(tokens), 1), start, dtype=tokens.dtype), tokens], dim=1)
