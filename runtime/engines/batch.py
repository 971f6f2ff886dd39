"""The KV cache of a paged engine's `forward`: sequences of a batch, each with pages of its own in memory that grows as they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from runtime.engines.base import Chunk


class Memory(Protocol):
    """Pages of keys and values: tensors whose first dimension is the page."""

    count: int

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...


M = TypeVar("M", bound=Memory)


class Source(Protocol[M]):
    """What a batch needs of its engine."""

    page_size: int
    most_rows: int

    @property
    def logits_width(self) -> int: ...

    def make_memory(self, count: int) -> M: ...

    def read(self, memory: M, pieces: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        """Logits `[rows, vocab]` after the last token of each piece, or after `every` token."""


class Batch(Generic[M]):
    """Rows of a batch and what of them is cached."""

    def __init__(self) -> None:
        self.memory: M | None = None
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []

    def forward(
        self, engine: Source[M], input_ids: torch.Tensor, attention_mask: torch.Tensor | None, last_only: bool
    ) -> torch.Tensor:
        """As `Engine.forward`; padding must be on the left, and positions count each row's own tokens. Logits of padding, and of
        rows that are nothing else, are zero.
        """
        batch, width = input_ids.shape
        if self.memory is None:
            self.pages, self.lengths = [[] for _ in range(batch)], [0] * batch
        real = [width] * batch if attention_mask is None else attention_mask[:, -width:].sum(1).tolist()
        ends = [length + count for length, count in zip(self.lengths, real, strict=True)]
        self._reserve(engine, ends)
        memory = self.memory
        assert memory is not None
        tokens = [ids[width - count :] for ids, count in zip(input_ids.tolist(), real, strict=True)]
        # Written in place: with a large vocabulary the logits are the most of what a call takes.
        logits = torch.zeros(batch, 1 if last_only else width, engine.logits_width, device=input_ids.device)
        if last_only and sum(real) <= engine.most_rows and all(real):  # all rows in one pass
            logits[:, 0] = engine.read(memory, [self._piece(row, ids, 0) for row, ids in enumerate(tokens)])
        else:
            for row, ids in enumerate(tokens):
                for start in range(0, len(ids), engine.most_rows):
                    piece = self._piece(row, ids[start : start + engine.most_rows], start)
                    found = engine.read(memory, [piece], every=not last_only)
                    place = 0 if last_only else width - len(ids) + start
                    logits[row, place : place + found.shape[0]] = found
        self.lengths = ends
        return logits

    def _piece(self, row: int, tokens: list[int], start: int) -> Chunk:
        return Chunk(tokens, self.lengths[row] + start, self.pages[row])

    def keep(self, engine: Source[M], rows: Sequence[int]) -> None:
        """Drop all sequences but these, and copy them to memory of their own size."""
        old, pages = self.memory, self.pages
        self.lengths = [self.lengths[row] for row in rows]
        self.memory, self.pages = None, [[] for _ in rows]
        if old is None:
            return
        self._reserve(engine, self.lengths)
        assert self.memory is not None
        for row, mine in zip(rows, self.pages, strict=True):
            _copy(old, pages[row][: len(mine)], self.memory, mine)

    def _reserve(self, engine: Source[M], lengths: Sequence[int]) -> None:
        """Pages for sequences of these lengths; memory that is too small is replaced by twice as much."""
        size = engine.page_size
        missing = [max(0, -(-n // size) - len(pages)) for n, pages in zip(lengths, self.pages, strict=True)]
        used = sum(map(len, self.pages))
        wanted = used + sum(missing)
        if self.memory is None or wanted > self.memory.count:
            memory = engine.make_memory(max(wanted, 2 * used))
            if self.memory is not None:
                _copy(self.memory, slice(used), memory, slice(used))
            self.memory = memory
        for count, pages in zip(missing, self.pages, strict=True):
            pages.extend(range(used, used + count))
            used += count


def _copy(source: Memory, here: Any, target: Memory, there: Any) -> None:
    for new, old in zip(target.tensors, source.tensors, strict=True):
        new[there] = old[here]
