"""Caches of draft models: a slot holds what the model has read of one sequence, and can be cut back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.engines.base import Chunk
from runtime.engines.streaming import plan


@dataclass(eq=False)
class Slot:
    """One sequence.

    Attributes:
        tokens: ids that are in the cache, in order; removing the last ones takes them out of it.
        pages: that hold them.
        memory: what a drafter remembers of the sequence besides.
        place: of the sequence in the target's cache, for drafters inside the target (`Place`). length: tokens read there, drafted ones too.
    """

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    memory: Any = None
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

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.most_rows: int = engine.most_rows
        self.trees = bool(getattr(engine, "trees", False))
        self._memory: Any = None
        self._free: list[int] = []

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read more of each sequence; logits after the last token of each, float32 `[slots, vocab]`."""
        return self._ends(slots, tokens)[0]

    def ahead(
        self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Read more of each sequence, at least one token, and tokens that may follow it: logits after the sequence and after each
        of these, a float32 `[1 + more, vocab]` for each slot. Those that are right may be added to the slot's tokens.
        """
        found = []
        for part in _passes([len(own) + len(extra) for own, extra in zip(tokens, more, strict=True)], self.most_rows):
            chunks = []
            for slot, own, extra in zip(slots[part], tokens[part], more[part], strict=True):
                if len(own) + len(extra) > self.most_rows:
                    self.feed([slot], [own[:-1]])
                    own = own[-1:]
                chunks.append(self._chunk(slot, [*own, *extra], 1 + len(extra)))
                slot.tokens += own
            found += self._verify(chunks)
        return found

    def branch(
        self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Tokens of a tree after what each slot holds: the last `len(tokens)` of `parents`, the others were given before. Logits after
        each, a float32 `[tokens, vocab]` for each slot. The slots themselves do not grow. Of a slot there are at most `most_rows` tokens.
        """
        chunks = [
            self._chunk(slot, new, len(new), above) for slot, new, above in zip(slots, tokens, parents, strict=True)
        ]
        passes = _passes([len(new) for new in tokens], self.most_rows)
        return [logits for part in passes for logits in self._verify(chunks[part])]

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
        most = self.most_rows
        # All but the last part of a sequence fill a pass, so that no pass has two parts of one.
        parts = [
            (slot, each[start : start + most], start + most >= len(each))
            for slot, each in zip(slots, tokens, strict=True)
            for start in range(0, len(each), most)
        ]
        found = []
        for together in _passes([len(new) for _, new, _ in parts], most):
            chunks = []
            for slot, new, _ in parts[together]:
                chunks.append(self._chunk(slot, new))
                slot.tokens += new
            rows = zip(*self._pass(chunks), strict=True)
            found += [row for row, (_, _, last) in zip(rows, parts[together], strict=True) if last]
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
        """Logits after the last token of each chunk; subclasses give more of what is there, a row a chunk."""
        return (self._engine.step(self._memory, chunks),)

    def _verify(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Logits of the outputs of each chunk."""
        logits: torch.Tensor = self._engine.verify(self._memory, chunks)[0]
        return list(logits.split([chunk.outputs for chunk in chunks]))

    def _chunk(
        self, slot: Slot, tokens: Sequence[int], outputs: int = 1, parents: Sequence[int] | None = None
    ) -> Chunk:
        """Tokens after those of a slot, which gets pages for them; of a tree the last ones, which were not read yet."""
        start, count = len(slot.tokens), len(tokens if parents is None else parents)
        self._reserve(slot, start + count)
        return Chunk(tokens, start, slot.pages, outputs, parents, count - len(tokens))

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
    """Draft cache of an engine of transformers' modules: a slot has one page, which is a cache of its own, and is read by itself.

    Args:
        engine: of the draft model; all its layers must keep every token.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.most_rows, self.trees = 512, False
        self._caches: dict[int, Any] = {}  # by page

    def close(self, slot: Slot) -> None:
        for page in slot.pages:
            del self._caches[page]
        slot.pages, slot.tokens = [], []

    @property
    def nbytes(self) -> int:
        return sum(map(self._engine.cache_bytes, self._caches.values()))

    def _reserve(self, slot: Slot, length: int) -> None:
        if not slot.pages:
            slot.pages = [id(slot)]
            self._caches[id(slot)] = self._engine.new_cache()

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
        return (torch.cat(self._verify(chunks)),)

    def _verify(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        found = []
        for chunk in chunks:
            cache, end = self._caches[chunk.pages[0]], chunk.start + len(chunk.tokens)
            if (extra := cache.get_seq_length() - chunk.start) > 0:  # 0 means all of it to older transformers
                cache.crop(-extra)
            ids = torch.tensor([chunk.tokens], device=self._engine.device)
            positions = torch.arange(chunk.start, end, device=self._engine.device)[None]
            logits = self._engine.forward(ids, cache, None, positions, last_only=chunk.outputs == 1)
            found.append(logits[0, -chunk.outputs :])
        return found


def position_bytes(engine: Any) -> int:
    """Memory of the keys and values of one token, all layers together; 0 where the engine does not tell."""
    module = getattr(engine, "module", None)
    if not engine.lockstep or module is None:
        return int(engine.page_bytes // engine.page_size)
    return plan.position_bytes(module.config, module.dtype)


def draft_cache_of(engine: Any) -> DraftCache:
    """The draft cache that an engine serves."""
    return DraftCache(engine) if hasattr(engine, "make_memory") else ModuleDraftCache(engine)
