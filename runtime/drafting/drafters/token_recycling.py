"""Token Recycling: the target's likeliest successors of a token are proposed when the token comes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Interval

from runtime.config.settings import Count
from runtime.drafting.drafters.base import Ask, Verified
from runtime.drafting.drafters.ngrams import GuessDrafter, Guessed
from runtime.drafting.drafters.tables.growth import Shapes
from runtime.drafting.drafters.tables.odds import Guesses
from runtime.sampling.tree import ROOT

_FIRST = 0.4  # chance of the first candidate as long as nothing is known; those after it by a power of their rank
_FALL = 1.3
_DEPTHS = 4  # that are counted apart; deeper ones together
_NONE = -1
_CHUNK = 64  # columns


@dataclass(eq=False)
class TokenRecycling(GuessDrafter):
    """A matrix holds of every token the target's likeliest next ones, from the last time its logits after the token were seen: of
    verified tokens, of rejected ones, and of those in the sequence. A tree of a fixed shape is filled from it, level by level (Token
    Recycling: Luo et al., arXiv 2408.08696). The matrix is of all sequences, so that a new one starts hot.

    The shape is not a table but follows from how often the candidate of each rank was right at each depth: the tree of so many nodes
    that are most likely reached. It is made anew now and then while these rates are learned.

    Attributes:
        candidates: next tokens that are kept of each token, the matrix's columns (int32; 1 MiB for 32k tokens and 8 of them).
        refit: verified steps after which the shape is made anew.
    """

    name: ClassVar[str] = "recycling"
    wants = frozenset(["steps"])
    candidates: Annotated[int, Interval(ge=1, le=64)] = 8
    refit: Count = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._estimates = [_FIRST / (rank + 1) ** _FALL for rank in range(self.candidates)]
        self.shapes = Shapes(self.refit, self._odds, self.candidates, _DEPTHS, self._rates)
        self.forget()

    def forget(self) -> None:
        self._matrix = np.empty((0, self.candidates), dtype=np.int32)

    def reset(self) -> None:
        super().reset()
        self.shapes.reset()

    def guess(self, state: Guessed, ask: Ask) -> Guesses:
        rows: dict[int, list[int]] = {}

        def choose(found: Guesses, above: int, rank: int, kind: int) -> tuple[int, float] | None:
            if above not in rows:
                rows[above] = self._row(ask.text.tokens[-1] if above == ROOT else found.tree.tokens[above])
            token = rows[above][rank]
            return None if token == _NONE else (token, self._estimates[rank])

        return self.shapes.fill(ask.nodes, ask.depth, ask.least, choose)

    def _row(self, token: int) -> list[int]:
        return self._matrix[token].tolist() if token < len(self._matrix) else [_NONE] * self.candidates

    def _rates(self, depths: int) -> list[list[float]]:
        odds, kind, estimates = self._odds, self.shapes.kind, list(enumerate(self._estimates))
        return [[odds.chance(kind(depth, rank), each) for rank, each in estimates] for depth in range(depths)]

    def learn(self, state: Guessed, verified: Verified) -> None:
        super().learn(state, verified)
        self.shapes.step()
        before = len(verified.text.tokens) - len(verified.new)
        if not before:
            return
        best = likeliest(verified.logits, self.candidates)
        if verified.logits.shape[1] > len(self._matrix):
            more = verified.logits.shape[1] - len(self._matrix)
            self._matrix = np.concatenate([self._matrix, np.full((more, self.candidates), _NONE, dtype=np.int32)])
        # A token may be there more than once: what followed it where it was right is worth more than where it was not.
        rows = {token: node + 1 for node, token in enumerate(verified.tree.tokens)}
        rows[verified.text.tokens[before - 1]] = 0
        rows.update({verified.tree.tokens[node]: node + 1 for node in verified.path})
        self._matrix[list(rows), : best.shape[1]] = best[list(rows.values())]

    @property
    def memory_bytes(self) -> int:
        return self._matrix.nbytes


def likeliest(logits: torch.Tensor, count: int) -> np.ndarray:
    """Ids of the `count` largest of each row, the largest first, int32 `[rows, count]` (fewer where the vocabulary is smaller)."""
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    chunks = vocabulary // _CHUNK
    if chunks <= 16 * count:
        return logits.topk(count).indices.int().numpy(force=True)
    # They are in the chunks of the largest maxima, and a maximum is much quicker to find than an order.
    whole = chunks * _CHUNK
    maxima = logits[:, :whole].view(rows, chunks, _CHUNK).amax(2)
    places = torch.arange(_CHUNK, device=logits.device)
    columns = (maxima.topk(count).indices[:, :, None] * _CHUNK + places).flatten(1)
    rest = torch.arange(whole, vocabulary, device=logits.device).expand(rows, -1)
    columns = torch.cat([columns, rest], dim=1)
    return columns.gather(1, logits.gather(1, columns).topk(count).indices).int().numpy(force=True)
