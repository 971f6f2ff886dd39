"""The KV cache of `CudaEngine.forward`: sequences of a batch, each with pages of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from runtime.engines.base import Piece
from runtime.engines.cuda.cache import Memory

if TYPE_CHECKING:
    from runtime.engines.cuda.engine import CudaEngine


class Batch:
    """Rows of a batch and what of them is cached; memory grows as they do."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []

    def forward(
        self, engine: CudaEngine, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, last_only: bool
    ) -> torch.Tensor:
        """See `CudaEngine.forward`."""
        batch, width = input_ids.shape
        if self.memory is None:
            self.pages, self.lengths = [[] for _ in range(batch)], [0] * batch
        real = [width] * batch if attention_mask is None else attention_mask[:, -width:].sum(1).tolist()
        self._reserve(engine, [length + count for length, count in zip(self.lengths, real, strict=True)])
        assert self.memory is not None
        places = 1 if last_only else width
        logits = torch.zeros(batch, places, engine.parts.vocabulary, device=engine.device)
        tokens = [ids[width - count :] for ids, count in zip(input_ids.tolist(), real, strict=True)]
        if last_only and sum(real) <= engine.most_rows and all(real):  # all rows in one pass
            pieces = [Piece(t, self.lengths[row], self.pages[row]) for row, t in enumerate(tokens)]
            logits[:, 0] = engine.read(self.memory, pieces).float()
        else:
            for row, ids in enumerate(tokens):
                for start in range(0, len(ids), engine.most_rows):
                    part = ids[start : start + engine.most_rows]
                    piece = Piece(part, self.lengths[row] + start, self.pages[row])
                    found = engine.read(self.memory, [piece], every=not last_only)
                    place = 0 if last_only else width - len(ids) + start
                    logits[row, place : place + found.shape[0]] = found.float()
        self.lengths = [length + count for length, count in zip(self.lengths, real, strict=True)]
        return logits

    def keep(self, engine: CudaEngine, rows: Sequence[int]) -> None:
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

    def _reserve(self, engine: CudaEngine, lengths: Sequence[int]) -> None:
        """Pages for sequences of these lengths; memory that is too small is replaced by twice as much."""
        missing = [
            -(-length // engine.page_size) - len(pages) for length, pages in zip(lengths, self.pages, strict=True)
        ]
        used = sum(map(len, self.pages))
        wanted = used + sum(max(0, count) for count in missing)
        if self.memory is None or wanted > self.memory.count:
            memory = engine.make_memory(max(wanted, 2 * used))
            if self.memory is not None:
                _copy(self.memory, list(range(used)), memory, list(range(used)))
            self.memory = memory
        for count, pages in zip(missing, self.pages, strict=True):
            pages.extend(range(used, used + max(0, count)))
            used += max(0, count)


def _copy(source: Memory, here: list[int], target: Memory, there: list[int]) -> None:
    for a, b in zip([*source.keys, *source.values], [*target.keys, *target.values], strict=True):
        b[there] = a[here]
