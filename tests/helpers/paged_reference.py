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
from runtime.engines.base import Chunk, Engine
from runtime.engines.rows import RowEngine

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


class PagedReference(Engine):
    """See `runtime.engines.base.Engine`.

    Attributes:
        steps: the chunks of every step, as (start, tokens).
        fail_at: the step (counted from 0) that raises; None: none.
    """

    device = torch.device("cpu")
    weight_bytes = 1000
    description = "a reference that reads token ids back"

    def __init__(
        self, logits: Logits, page_size: int = 4, most_rows: int = 24, vocab: int = 400, context: int | None = 128
    ) -> None:
        self.following = logits
        self.page_size = page_size
        self.page_bytes = 100
        self.most_rows = most_rows
        self.vocab_size = vocab
        self.context_length = context
        self.steps: list[list[tuple[int, tuple[int, ...]]]] = []
        self.fail_at: int | None = None

    def new_pages(self, count: int, drafts: bool = False) -> torch.Tensor:
        return torch.full((count, self.page_size), NOTHING)

    def read(self, pool: torch.Tensor, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        assert chunks
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.most_rows
        if self.fail_at == len(self.steps):
            raise OSError("the engine broke")
        self.steps.append([(chunk.start, tuple(chunk.tokens)) for chunk in chunks])
        slots = pool.view(-1)
        # Before anything is written: what a chunk builds on must be there from earlier steps.
        before = [slots[self._places(chunk)[: chunk.start]].tolist() for chunk in chunks]
        written: set[int] = set()
        for chunk in chunks:
            places = self._places(chunk)[chunk.start :]
            assert written.isdisjoint(places), "two sequences write to one place"
            written.update(places)
            slots[places] = torch.tensor(chunk.tokens)
        rows = []
        for chunk, ids in zip(chunks, before, strict=True):
            assert NOTHING not in ids, "a chunk builds on positions that were never computed"
            own = slots[self._places(chunk)[chunk.start :]].tolist()
            ends = range(1 if every else len(own), len(own) + 1)
            rows += [self.following((*ids, *own[:end])) for end in ends]
        return torch.stack(rows)

    def _places(self, chunk: Chunk) -> list[int]:
        end = chunk.start + len(chunk.tokens)
        assert chunk.tokens
        assert len(chunk.pages) * self.page_size >= end
        return [chunk.pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(end)]

    def verify(self, pool: Any, chunks: Any, hidden: bool = False) -> Any:
        raise AssertionError("nobody drafts here")

    def keep(self, pool: Any, chunk: Any, path: Any) -> None:
        raise AssertionError("nobody drafts here")

    def explain(self) -> dict[str, str]:
        return {"everything": "reference"}


class RowReference(RowEngine):
    """A reference without pages: its cache is the token ids of the rows, padding left out."""

    device = torch.device("cpu")
    weight_bytes = 1000
    description = "a reference that keeps rows"

    def __init__(self, logits: Logits, vocab: int = 400, context: int | None = 128) -> None:
        self.following, self.vocab_size, self.context_length = logits, vocab, context

    def new_cache(self) -> list[list[int]]:
        return []

    def forward(
        self, input_ids: torch.Tensor, cache: Any, attention_mask: Any, position_ids: Any, last_only: bool = False
    ) -> torch.Tensor:
        rows = [] if cache is None else cache
        if not rows:
            rows.extend([] for _ in input_ids)
        width = input_ids.shape[1]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -width:]
        result = torch.zeros(len(rows), 1 if last_only else width, self.vocab_size)
        for row, new, real, found in zip(rows, input_ids.tolist(), mask.tolist(), result, strict=True):
            for place, (token, is_token) in enumerate(zip(new, real, strict=True)):
                if is_token:
                    row.append(token)
                    if not last_only or place == width - 1:
                        found[0 if last_only else place] = self.following(tuple(row))
        if position_ids is not None:
            assert position_ids[:, -1].tolist() == [len(row) - 1 for row in rows]
        return result

    def keep_rows(self, cache: list[list[int]], rows: torch.Tensor) -> None:
        cache[:] = [cache[row] for row in rows.tolist()]

    def cache_bytes(self, cache: list[list[int]]) -> int:
        return sum(len(row) for row in cache)

    def explain(self) -> dict[str, str]:
        return {"everything": "reference"}


def model_of(engine: Any, eos: Sequence[int] = (1,), with_tokenizer: bool = True, prefix_cache: int = 0) -> Model:
    """A model around an engine, without a directory."""
    artifact: Any = SimpleNamespace(path=Path("tiny"))
    words = tokenizer() if with_tokenizer else None
    return Model(engine, words, artifact, frozenset(eos), prefix_cache=prefix_cache)
