"""Lanes over a paged engine, in memory that grows as they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.decoding.drafters.lanes import Lane
from runtime.engines.base import Piece


class PagedLanes:
    """Lanes that read texts.

    Args:
        engine: a `PagedEngine` of the draft model, whose `make_memory` gives what it takes as a pool.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.most_rows: int = engine.most_rows
        self.vocabulary: int = engine.logits_width
        self._memory: Any = None
        self._free: list[int] = []

    def open(self) -> Lane:
        return Lane()

    def feed(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._ends(lanes, tokens)[0]

    def _ends(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """As `feed`: all that `_pass` gives, after the last token of each text."""
        found: list[tuple[torch.Tensor, ...]] = [()] * len(lanes)
        waiting = [(index, list(each)) for index, each in enumerate(tokens)]
        while waiting:
            pieces, places, later, rows = [], [], [], self.most_rows
            for index, rest in waiting:
                now, after = rest[:rows], rest[rows:]
                if now:
                    lane = lanes[index]
                    self._reserve(lane, len(lane.tokens) + len(now))
                    pieces.append(Piece(now, len(lane.tokens), lane.pages))
                    places.append((index, not after))
                    lane.tokens += now
                    rows -= len(now)
                if after:
                    later.append((index, after))
            each = self._pass(pieces)
            for row, (index, done) in enumerate(places):
                if done:
                    found[index] = tuple(tensor[row] for tensor in each)
            waiting = later
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def _pass(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, ...]:
        """Logits after the last token of each piece; subclasses give more of what is there, a row a piece."""
        return (self._engine.step(self._memory, pieces),)

    def cut(self, lane: Lane, length: int) -> None:
        del lane.tokens[length:]

    def close(self, lane: Lane) -> None:
        self._free += lane.pages
        lane.pages, lane.tokens = [], []

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.count * self._engine.page_bytes

    def _reserve(self, lane: Lane, length: int) -> None:
        missing = -(-length // self._engine.page_size) - len(lane.pages)
        if missing <= 0:
            return
        if len(self._free) < missing:
            before = 0 if self._memory is None else self._memory.count
            memory = self._engine.make_memory(max(2 * before, before + missing, 16))
            if self._memory is not None:
                for new, old in zip(memory.tensors, self._memory.tensors, strict=True):
                    new[:before] = old[:before]  # an engine may have pages of its own after them
            self._memory = memory
            self._free += range(before, memory.count)
        lane.pages += [self._free.pop() for _ in range(missing)]


class PagedAheadLanes(PagedLanes):
    """Lanes that also read what may follow a text. See `AheadLanes`.

    Args:
        engine: a `SpeculativeEngine` of the draft model.
    """

    def ahead(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        found = []
        for part in _passes([len(own) + len(extra) for own, extra in zip(tokens, more, strict=True)], self.most_rows):
            found += self._ahead(lanes[part], tokens[part], more[part])
        return found

    def _ahead(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        pieces = []
        for lane, own, extra in zip(lanes, tokens, more, strict=True):
            if len(own) + len(extra) > self.most_rows:
                self.feed([lane], [own[:-1]])
                own = own[-1:]
            self._reserve(lane, len(lane.tokens) + len(own) + len(extra))
            pieces.append(Piece([*own, *extra], len(lane.tokens), lane.pages, 1 + len(extra)))
            lane.tokens += own
        return self._verify(pieces)

    def _verify(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Logits of the outputs of each piece."""
        logits: torch.Tensor = self._engine.verify(self._memory, pieces)[0]
        return list(logits.split([piece.outputs for piece in pieces]))

    def keep(self, lane: Lane, tokens: Sequence[int]) -> None:
        lane.tokens += tokens


class PagedTreeLanes(PagedAheadLanes):
    """Lanes that also read trees of what may follow a text. See `TreeLanes`.

    Args:
        engine: a `SpeculativeEngine` of the draft model whose pieces may have parents.
    """

    def branch(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        pieces = []
        for lane, new, above in zip(lanes, tokens, parents, strict=True):
            start = len(lane.tokens)
            self._reserve(lane, start + len(above))
            pieces.append(Piece(new, start, lane.pages, len(new), above, len(above) - len(new)))
        found = []
        for part in _passes([len(new) for new in tokens], self.most_rows):
            found += self._verify(pieces[part])
        return found


def _passes(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """What goes together in a pass of at most so many tokens; one that is larger goes alone."""
    start = total = 0
    for index, size in enumerate(sizes):
        if total and total + size > most:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if total:
        yield slice(start, len(sizes))
