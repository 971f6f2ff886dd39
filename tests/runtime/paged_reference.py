"""A paged engine for tests: its pages hold token ids, and logits come from the ids read back through the page table.

A wrong page, a page that was overwritten or one that is not computed yet gives other tokens, or is noticed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny_models import tokenizer

from runtime.api.model import Model
from runtime.engines.base import Chunk

Logits = Callable[[tuple[int, ...]], torch.Tensor]
NOTHING = -1


def hashed(vocab: int = 400) -> Logits:
    """Logits that depend on every id and its place, in a few microseconds."""

    def logits(ids: tuple[int, ...]) -> torch.Tensor:
        generator = np.random.Generator(np.random.PCG64(hash(ids) & 0xFFFFFFFFFFFF))
        return torch.from_numpy(generator.standard_normal(vocab, dtype=np.float32) * 3)

    return logits


def of_module(module: Any) -> Logits:
    """Logits of a transformers model; each sequence is computed once and remembered."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(ids: tuple[int, ...]) -> torch.Tensor:
        if ids not in known:
            known[ids] = module(torch.tensor([ids])).logits[0, -1].float()
        return known[ids]

    return logits


class PagedReference:
    """See `runtime.engines.base.PagedEngine`.

    Attributes:
        steps: the pieces of every step, as (start, tokens).
        fail_at: the step (counted from 0) that raises; None: none.
    """

    padding_is_exact = True
    device = torch.device("cpu")
    weight_bytes = 1000
    description = "a reference that reads token ids back"

    def __init__(
        self, logits: Logits, page_size: int = 4, most_rows: int = 24, vocab: int = 400, context: int | None = 128
    ) -> None:
        self.logits = logits
        self.page_size = page_size
        self.page_bytes = 100
        self.most_rows = most_rows
        self.vocab_size = vocab
        self.context_length = context
        self.steps: list[list[tuple[int, tuple[int, ...]]]] = []
        self.fail_at: int | None = None

    # ---------------------------------------------------------------- pages
    def new_pages(self, count: int) -> torch.Tensor:
        return torch.full((count, self.page_size), NOTHING)

    def step(self, pool: torch.Tensor, pieces: Sequence[Chunk]) -> torch.Tensor:
        assert pieces
        assert sum(len(piece.tokens) for piece in pieces) <= self.most_rows
        if self.fail_at == len(self.steps):
            raise OSError("the engine broke")
        self.steps.append([(piece.start, tuple(piece.tokens)) for piece in pieces])
        slots = pool.view(-1)
        # Before anything is written: what a piece builds on must be there from earlier steps.
        before = [slots[self._places(piece)[: piece.start]].tolist() for piece in pieces]
        written: set[int] = set()
        for piece in pieces:
            places = self._places(piece)[piece.start :]
            assert written.isdisjoint(places), "two sequences write to one place"
            written.update(places)
            slots[places] = torch.tensor(piece.tokens)
        rows = []
        for piece, ids in zip(pieces, before, strict=True):
            assert NOTHING not in ids, "a piece builds on positions that were never computed"
            rows.append(self.logits((*ids, *slots[self._places(piece)[piece.start :]].tolist())))
        return torch.stack(rows)

    def _places(self, piece: Chunk) -> list[int]:
        end = piece.start + len(piece.tokens)
        assert piece.tokens
        assert len(piece.pages) * self.page_size >= end
        return [piece.pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(end)]

    # ---------------------------------------------------------------- engine
    def new_cache(self) -> list[list[int]]:
        return []

    def forward(
        self, input_ids: torch.Tensor, cache: Any, mask: Any, positions: Any, last_only: bool = False
    ) -> torch.Tensor:
        rows = [[] for _ in input_ids] if cache is None else cache
        if not rows:
            rows.extend([] for _ in input_ids)
        result = []
        for row, new in zip(rows, input_ids.tolist(), strict=True):
            start = len(row)
            row.extend(new)
            ends = range(len(row) if last_only else start + 1, len(row) + 1)
            result.append(torch.stack([self.logits(tuple(row[:end])) for end in ends]))
        return torch.stack(result)

    def keep_rows(self, cache: list[list[int]], rows: torch.Tensor) -> None:
        cache[:] = [cache[row] for row in rows.tolist()]

    def cache_bytes(self, cache: list[list[int]]) -> int:
        return sum(len(row) for row in cache)

    def explain(self) -> dict[str, str]:
        return {"everything": "reference"}


def model_of(engine: Any, eos: Sequence[int] = (1,), with_tokenizer: bool = True) -> Model:
    """A model around an engine, without a directory."""
    artifact: Any = SimpleNamespace(path=Path("tiny"))
    return Model(engine, tokenizer() if with_tokenizer else None, artifact, frozenset(eos))
