"""Token Recycling: what the target thought might follow a token, right or not, is proposed the next time the token comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Interval

from runtime.config.settings import Count
from runtime.drafting.drafters.base import Ask, Drafter, Text, Verified
from runtime.drafting.drafters.tables.growth import grow
from runtime.drafting.drafters.tables.odds import Guesses, Odds
from runtime.sampling.tree import ROOT, Tree

_FIRST = 0.4  # chance of the first candidate as long as nothing is known; those after it by a power of their rank
_FALL = 1.3
_DEPTHS = 4  # that are counted apart; deeper ones together
_NOTHING = -1
_CHUNK = 64  # columns


@dataclass(eq=False)
class Recycling(Drafter):
    """A matrix holds of every token the target's likeliest next ones, from the last time its logits after the token were seen: of
    verified tokens, of rejected ones, and of those in the text. A tree of a fixed shape is filled from it, level by level (Token
    Recycling: Luo et al., arXiv 2408.08696). The matrix is of all texts, so that a new one starts hot.

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
        self.reset()

    def forget(self) -> None:
        self._matrix = np.empty((0, self.candidates), dtype=np.int32)

    def reset(self) -> None:
        self.forget()
        self._odds = Odds(_DEPTHS * self.candidates)
        self._shapes: dict[tuple[int, int], Guesses] = {}
        self._steps = 0

    def begin(self, text: Text) -> Any:
        return _Recycled()

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Tree:
        guesses = ask.state.guesses = Guesses(length=len(ask.text.tokens))
        tree, shape = guesses.tree, self._shape(ask.nodes, ask.depth)
        node_of = {ROOT: ROOT}  # of places of the shape
        reach = {ROOT: 1.0}
        rows = {ROOT: self._row(ask.text.tokens[-1])}
        for place, (parent, rank) in enumerate(zip(shape.tree.parents, shape.tree.tokens, strict=True)):
            above = node_of.get(parent)
            if above is None or reach[above] < ask.least:
                continue
            if above not in rows:
                rows[above] = self._row(tree.tokens[above])
            token = rows[above][rank]
            if token != _NOTHING:
                kind, estimate = shape.kinds[place], shape.estimates[place]
                chance = self._odds.chance(kind, estimate)
                node_of[place] = node = guesses.add(token, above, chance, kind, estimate)
                reach[node] = reach[above] * chance
        return tree

    def _row(self, token: int) -> list[int]:
        return self._matrix[token].tolist() if token < len(self._matrix) else [_NOTHING] * self.candidates

    def _shape(self, nodes: int, depth: int) -> Guesses:
        """The tree of so many nodes that are most likely reached, ranks in the place of tokens."""
        if (nodes, depth) not in self._shapes:
            levels = []
            for first in range(0, _DEPTHS * self.candidates, self.candidates):
                kinds = range(first, first + self.candidates)
                chances = [
                    self._odds.chance(kind, estimate) for kind, estimate in zip(kinds, self._estimates, strict=True)
                ]
                levels.append(list(zip(range(self.candidates), chances, kinds, self._estimates, kinds, strict=True)))
            self._shapes[nodes, depth] = grow(0, lambda _, level: levels[min(level, _DEPTHS - 1)], nodes, depth)
        return self._shapes[nodes, depth]

    def learn(self, state: Any, verified: Verified) -> None:
        text = verified.text.tokens
        before = len(text) - len(verified.new)
        state.guesses.settle(self._odds, before, verified.new)
        self._steps += 1
        if self._steps % self.refit == 0:
            self._shapes.clear()
        if not before:
            return
        best = likeliest(verified.logits, self.candidates)
        if verified.logits.shape[1] > len(self._matrix):
            more = verified.logits.shape[1] - len(self._matrix)
            self._matrix = np.concatenate([self._matrix, np.full((more, self.candidates), _NOTHING, dtype=np.int32)])
        # A token may be there more than once: what followed it where it was right is worth more than where it was not.
        rows = {token: node + 1 for node, token in enumerate(verified.tree.tokens)}
        rows[text[before - 1]] = 0
        rows.update({verified.tree.tokens[node]: node + 1 for node in verified.path})
        self._matrix[list(rows), : best.shape[1]] = best[list(rows.values())]

    @property
    def memory_bytes(self) -> int:
        return self._matrix.nbytes


@dataclass(eq=False)
class _Recycled:
    """What was proposed last for a text."""

    guesses: Guesses = field(default_factory=Guesses)


def likeliest(logits: torch.Tensor, count: int) -> np.ndarray:
    """Ids of the `count` largest of each row, the largest first, int32 `[rows, count]` (fewer where the vocabulary is smaller)."""
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    chunks = vocabulary // _CHUNK
    if chunks <= 16 * count:
        return _on_cpu(logits.topk(count).indices)
    # They are in the chunks of the largest maxima, and a maximum is much quicker to find than an order.
    whole = chunks * _CHUNK
    maxima = logits[:, :whole].view(rows, chunks, _CHUNK).amax(2)
    places = torch.arange(_CHUNK, device=logits.device)
    columns = (maxima.topk(count).indices[:, :, None] * _CHUNK + places).flatten(1)
    rest = torch.arange(whole, vocabulary, device=logits.device).expand(rows, -1)
    columns = torch.cat([columns, rest], dim=1)
    return _on_cpu(columns.gather(1, logits.gather(1, columns).topk(count).indices))


def _on_cpu(ids: torch.Tensor) -> np.ndarray:
    found: np.ndarray = ids.to(torch.int32).cpu().numpy()
    return found
