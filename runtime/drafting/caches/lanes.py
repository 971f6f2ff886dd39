"""Texts in the cache of a draft model: each lane holds what the model has read of one text, and can be cut back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from runtime.engines.base import Chunk


@dataclass(eq=False)
class Lane:
    """One text.

    Attributes:
        tokens: ids that are in the cache, in order. notes: nodes of a tree that were read after them.
        unsure: how many tokens after them an unpaged cache holds that were not kept.
        pages: that hold them (paged engines). cache: that holds them (others).
    """

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cache: Any = None
    notes: list[int] = field(default_factory=list)
    unsure: int = 0


@runtime_checkable
class Lanes(Protocol):
    """The cache of a draft model.

    Attributes:
        most_rows: tokens of a pass.
        vocabulary: width of the logits.
    """

    most_rows: int
    vocabulary: int

    def open(self) -> Lane:
        """An empty one."""

    def feed(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read more of each text; logits after the last token of each, float32 `[lanes, vocab]`."""

    def cut(self, lane: Lane, length: int) -> None:
        """Forget all but the first `length` tokens."""

    def close(self, lane: Lane) -> None:
        """Give its memory back."""

    @property
    def nbytes(self) -> int:
        """Memory of the caches."""


@runtime_checkable
class AheadLanes(Lanes, Protocol):
    """Lanes that also read what may follow a text."""

    def ahead(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Read more of each text, at least one token, and tokens that may follow it: logits after the last of the text's and after each
        of these, a float32 `[1 + more, vocab]` for each lane. `keep` says which stay; without it none does.
        """

    def keep(self, lane: Lane, tokens: Sequence[int]) -> None:
        """The first of those that `ahead` read after the text belong to it."""


@runtime_checkable
class TreeLanes(Lanes, Protocol):
    """Lanes that also read trees of what may follow a text."""

    def branch(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Tokens of a tree after what each lane holds: the last `len(tokens)` of `parents`, the others were given before. Logits after
        each, a float32 `[tokens, vocab]` for each lane. The lanes themselves do not grow. Of a lane there are at most `most_rows` tokens.
        """


def lanes_of(engine: Any) -> Lanes:
    """All that an engine can: `TreeLanes` where it computes trees, else `AheadLanes`."""

    if not hasattr(engine, "make_memory"):
        return PlainLanes(engine)
    return PagedTreeLanes(engine) if getattr(engine, "trees", False) else PagedAheadLanes(engine)


# Lanes over a paged engine, in memory that grows as they do.


class PagedLanes:
    """Lanes that read texts.

    Args:
        engine: an engine of the draft model, whose `make_memory` gives what it takes as a pool.
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
                    pieces.append(Chunk(now, len(lane.tokens), lane.pages))
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

    def _pass(self, pieces: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
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
        engine: an engine of the draft model.
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
            pieces.append(Chunk([*own, *extra], len(lane.tokens), lane.pages, 1 + len(extra)))
            lane.tokens += own
        return self._verify(pieces)

    def _verify(self, pieces: Sequence[Chunk]) -> list[torch.Tensor]:
        """Logits of the outputs of each piece."""
        logits: torch.Tensor = self._engine.verify(self._memory, pieces)[0]
        return list(logits.split([piece.outputs for piece in pieces]))

    def keep(self, lane: Lane, tokens: Sequence[int]) -> None:
        lane.tokens += tokens


class PagedTreeLanes(PagedAheadLanes):
    """Lanes that also read trees of what may follow a text. See `TreeLanes`.

    Args:
        engine: an engine of the draft model whose chunks may have parents.
    """

    def branch(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        pieces = []
        for lane, new, above in zip(lanes, tokens, parents, strict=True):
            start = len(lane.tokens)
            self._reserve(lane, start + len(above))
            pieces.append(Chunk(new, start, lane.pages, len(new), above, len(above) - len(new)))
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


# Lanes over an engine of transformers' modules.


class PlainLanes:
    """Lanes of which each has a cache of its own and is read by itself.

    Args:
        engine: of the draft model; all its layers must keep every token.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.most_rows = 512
        self.vocabulary: int = engine.vocab_size
        self._lanes: dict[int, Lane] = {}

    def open(self) -> Lane:
        lane = Lane(cache=self._engine.new_cache())
        self._lanes[id(lane)] = lane
        return lane

    def feed(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.cat([self._read(lane, each) for lane, each in zip(lanes, tokens, strict=True)])

    def _read(self, lane: Lane, tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.empty(0)
        self.cut(lane, len(lane.tokens))
        for start in range(0, len(tokens), self.most_rows):
            part = list(tokens[start : start + self.most_rows])
            ids = torch.tensor([part], device=self._engine.device)
            positions = torch.arange(len(lane.tokens), len(lane.tokens) + len(part), device=self._engine.device)[None]
            logits = self._engine.forward(ids, lane.cache, None, positions, True)[:, -1]
            lane.tokens += part
        return logits

    def ahead(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        found = []
        for lane, own, extra in zip(lanes, tokens, more, strict=True):
            self._read(lane, own[:-1])
            ids = torch.tensor([[*own[-1:], *extra]], device=self._engine.device)
            start = len(lane.tokens)
            positions = torch.arange(start, start + ids.shape[1], device=self._engine.device)[None]
            found.append(self._engine.forward(ids, lane.cache, None, positions)[0])
            lane.tokens += own[-1:]
            lane.unsure = len(extra)
        return found

    def keep(self, lane: Lane, tokens: Sequence[int]) -> None:
        lane.tokens += tokens
        lane.unsure -= len(tokens)

    def cut(self, lane: Lane, length: int) -> None:
        extra = max(0, len(lane.tokens) - length) + lane.unsure
        if extra:
            lane.cache.crop(-extra)
            lane.unsure = 0
            del lane.tokens[length:]

    def close(self, lane: Lane) -> None:
        lane.cache, lane.tokens = None, []
        self._lanes.pop(id(lane), None)

    @property
    def nbytes(self) -> int:
        return sum(self._engine.cache_bytes(lane.cache) for lane in self._lanes.values())
