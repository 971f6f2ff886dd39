"""Caches of draft models: a slot holds what the model has read of one sequence, and can be cut back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.engines.base import Chunk


@dataclass(eq=False)
class Slot:
    """One sequence.

    Attributes:
        tokens: ids that are in the cache, in order. notes: nodes of a tree that were read after them.
        pages: that hold them (paged engines). cache: that holds them (others).
        rejected: how many tokens after them an unpaged cache still holds.
        place: of the sequence in the target's cache, for drafters inside the target (`Place`). length: tokens read there, drafted ones too.
    """

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cache: Any = None
    notes: list[int] = field(default_factory=list)
    rejected: int = 0
    place: Any = None
    length: int = 0


class DraftCache:
    """The cache of a draft model in the pages of its engine, in memory that grows with the sequences.

    Args:
        engine: of the draft model; its `make_memory` gives what it takes as a pool.

    Attributes:
        most_rows: tokens of a pass.
        trees: whether `branch` works: the engine's chunks may have parents.
    """

    most_rows: int
    trees = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.most_rows = engine.most_rows
        self.trees = bool(getattr(engine, "trees", False))
        self._memory: Any = None
        self._free: list[int] = []

    def open(self) -> Slot:
        """An empty slot."""
        return Slot()

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read more of each sequence; logits after the last token of each, float32 `[slots, vocab]`."""
        return self._ends(slots, tokens)[0]

    def ahead(
        self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Read more of each sequence, at least one token, and tokens that may follow it: logits after the sequence and after each
        of these, a float32 `[1 + more, vocab]` for each slot. `keep` says which stay; without it none does.
        """
        found = []
        for part in _passes([len(own) + len(extra) for own, extra in zip(tokens, more, strict=True)], self.most_rows):
            chunks = []
            for slot, own, extra in zip(slots[part], tokens[part], more[part], strict=True):
                if len(own) + len(extra) > self.most_rows:
                    self.feed([slot], [own[:-1]])
                    own = own[-1:]
                self._reserve(slot, len(slot.tokens) + len(own) + len(extra))
                chunks.append(Chunk([*own, *extra], len(slot.tokens), slot.pages, 1 + len(extra)))
                slot.tokens += own
            found += self._verify(chunks)
        return found

    def keep(self, slot: Slot, tokens: Sequence[int]) -> None:
        """The first of the tokens that `ahead` read after the sequence belong to it."""
        slot.tokens += tokens

    def branch(
        self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Tokens of a tree after what each slot holds: the last `len(tokens)` of `parents`, the others were given before. Logits after
        each, a float32 `[tokens, vocab]` for each slot. The slots themselves do not grow. Of a slot there are at most `most_rows` tokens.
        """
        chunks = []
        for slot, new, above in zip(slots, tokens, parents, strict=True):
            start = len(slot.tokens)
            self._reserve(slot, start + len(above))
            chunks.append(Chunk(new, start, slot.pages, len(new), above, len(above) - len(new)))
        passes = _passes([len(new) for new in tokens], self.most_rows)
        return [logits for part in passes for logits in self._verify(chunks[part])]

    def cut(self, slot: Slot, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del slot.tokens[length:]

    def close(self, slot: Slot) -> None:
        """Give the slot's memory back."""
        self._free += slot.pages
        slot.pages, slot.tokens = [], []

    @property
    def nbytes(self) -> int:
        """Memory of the cache."""
        return 0 if self._memory is None else self._memory.count * self._engine.page_bytes

    # ---------------------------------------------------------------- passes and pages
    def _ends(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """As `feed`: all that `_pass` gives, after the last token of each sequence."""
        found: list[tuple[torch.Tensor, ...]] = [()] * len(slots)
        waiting = [(index, list(each)) for index, each in enumerate(tokens)]
        while waiting:
            chunks, places, later, rows = [], [], [], self.most_rows
            for index, rest in waiting:
                now, after = rest[:rows], rest[rows:]
                if now:
                    slot = slots[index]
                    self._reserve(slot, len(slot.tokens) + len(now))
                    chunks.append(Chunk(now, len(slot.tokens), slot.pages))
                    places.append((index, not after))
                    slot.tokens += now
                    rows -= len(now)
                if after:
                    later.append((index, after))
            each = self._pass(chunks)
            for row, (index, done) in enumerate(places):
                if done:
                    found[index] = tuple(tensor[row] for tensor in each)
            waiting = later
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
        """Logits after the last token of each chunk; subclasses give more of what is there, a row a chunk."""
        return (self._engine.step(self._memory, chunks),)

    def _verify(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Logits of the outputs of each chunk."""
        logits: torch.Tensor = self._engine.verify(self._memory, chunks)[0]
        return list(logits.split([chunk.outputs for chunk in chunks]))

    def _reserve(self, slot: Slot, length: int) -> None:
        missing = -(-length // self._engine.page_size) - len(slot.pages)
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
        slot.pages += [self._free.pop() for _ in range(missing)]


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


class ModuleDraftCache(DraftCache):
    """Draft cache of an engine of transformers' modules: each slot has a cache of its own and is read by itself.

    Args:
        engine: of the draft model; all its layers must keep every token.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.most_rows = 512
        self._slots: dict[int, Slot] = {}

    def open(self) -> Slot:
        slot = Slot(cache=self._engine.new_cache())
        self._slots[id(slot)] = slot
        return slot

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.cat([self._read(slot, each) for slot, each in zip(slots, tokens, strict=True)])

    def ahead(
        self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        found = []
        for slot, own, extra in zip(slots, tokens, more, strict=True):
            self._read(slot, own[:-1])
            found.append(self._forward(slot, [*own[-1:], *extra])[0])
            slot.tokens += own[-1:]
            slot.rejected = len(extra)
        return found

    def keep(self, slot: Slot, tokens: Sequence[int]) -> None:
        super().keep(slot, tokens)
        slot.rejected -= len(tokens)

    def cut(self, slot: Slot, length: int) -> None:
        extra = max(0, len(slot.tokens) - length) + slot.rejected
        if extra:
            slot.cache.crop(-extra)
            slot.rejected = 0
            del slot.tokens[length:]

    def close(self, slot: Slot) -> None:
        slot.cache, slot.tokens = None, []
        self._slots.pop(id(slot), None)

    @property
    def nbytes(self) -> int:
        return sum(self._engine.cache_bytes(slot.cache) for slot in self._slots.values())

    def _read(self, slot: Slot, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after the last of the tokens, `[1, vocab]`."""
        logits = torch.empty(0)
        self.cut(slot, len(slot.tokens))
        for start in range(0, len(tokens), self.most_rows):
            part = list(tokens[start : start + self.most_rows])
            logits = self._forward(slot, part, True)[:, -1]
            slot.tokens += part
        return logits

    def _forward(self, slot: Slot, tokens: Sequence[int], *last_only: bool) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self._engine.device)
        start = len(slot.tokens)
        positions = torch.arange(start, start + len(tokens), device=self._engine.device)[None]
        logits: torch.Tensor = self._engine.forward(ids, slot.cache, None, positions, *last_only)
        return logits


def draft_cache_of(engine: Any) -> DraftCache:
    """The draft cache that an engine serves."""
    return DraftCache(engine) if hasattr(engine, "make_memory") else ModuleDraftCache(engine)
