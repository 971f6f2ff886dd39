"""The next token of a draft model: drawn as the target would draw it, or the likeliest; in the ids of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.decoding.drafters.base import Draw
from runtime.decoding.sampling import process, seen_tokens


class Candidates:
    """From a draft's logits to tokens of the target.

    Args:
        vocabulary: of the target.
        kept: int64 `[draft's vocabulary]`, the target's id of each of the draft's tokens; None: they are the same (a draft with more
            tokens than the target, as of padded embeddings, proposes none of them).
    """

    def __init__(self, vocabulary: int, kept: torch.Tensor | None = None) -> None:
        self.vocabulary, self._kept = vocabulary, kept

    def best(self, logits: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens of each row of float32 `[rows, draft's vocabulary]`, and their probabilities."""
        logits = logits[:, : self.vocabulary] if self._kept is None else logits
        values, ids = torch.topk(logits, min(count, logits.shape[1]), dim=-1)
        chances = torch.exp(values - torch.logsumexp(logits, -1, keepdim=True))
        if self._kept is not None:
            ids = self._kept[ids.cpu()]
        return ids.tolist(), chances.tolist()

    def distribution(self, logits: torch.Tensor, draw: Draw, before: Sequence[int]) -> torch.Tensor:
        """What to draw from after one row `[draft's vocabulary]`, float32 `[vocabulary]` on the CPU, with the options of the call.

        Args:
            before: tokens of the text and of the branch, for the repetition penalty.
        """
        row = logits.float().cpu()
        if self._kept is not None:
            whole = row.new_full((self.vocabulary,), float("-inf"))
            whole[self._kept] = row
            row = whole
        elif row.shape[0] < self.vocabulary:
            row = torch.cat([row, row.new_full((self.vocabulary - row.shape[0],), float("-inf"))])
        row = row[: self.vocabulary][None]
        seen = None
        if draw.options.repetition_penalty != 1.0:
            seen = seen_tokens(before, row)[None]
        return torch.softmax(process(row, seen, draw.options)[0], -1)

    @staticmethod
    def draw(q: torch.Tensor, draw: Draw, count: int = 1) -> list[int]:
        """Up to `count` tokens, one after another without replacement."""
        count = min(count, int((q > 0).sum()))
        return torch.multinomial(q, count, replacement=False, generator=draw.generator).tolist()
