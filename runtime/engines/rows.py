"""Engines whose KV cache is one batch of rows: a page of their pools is a row, which grows as its sequence does and never fills."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from runtime.engines.base import Chunk, Engine, Usage

ROW = 1 << 40  # positions of a page that is a row: more than any sequence has


class RowEngine(Engine):
    """Base class: subclasses compute a batch that is padded on the left, over a cache of their own."""

    lockstep = True
    page_size = ROW
    page_bytes = 0
    most_rows = ROW

    @abstractmethod
    def new_cache(self) -> Any:
        """An empty KV cache; it grows with every `forward`."""

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        attention_mask: Any,
        position_ids: torch.Tensor | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Logits, float32 `[batch, seq or 1, vocab]`.

        Args:
            input_ids: int64 `[batch, seq]`, the tokens after those in `cache`.
            cache: from `new_cache`, or None to keep nothing.
            attention_mask: int64 `[batch, cached + seq]`, 1 = token, 0 = padding; None: no padding anywhere.
            position_ids: int64 `[batch, seq]`; None: counted from the cached length.
            last_only: only the last position's logits are wanted.
        """

    @abstractmethod
    def keep_rows(self, cache: Any, rows: torch.Tensor) -> None:
        """Drop all sequences of `cache` but `rows` (int64 indices), in that order, and free their memory."""

    @abstractmethod
    def cache_bytes(self, cache: Any) -> int:
        """Memory that `cache` holds."""

    def rewind(self, cache: Any, count: int) -> bool:
        """Remove the last `count` tokens (may be 0) from a cache of one row; False if such a cache cannot be continued."""
        return False

    # ---------------------------------------------------------------- as an engine of pages
    def new_pages(self, count: int, drafts: bool = False) -> RowPool:
        """An empty batch; `count` says nothing: it has the rows that its first step begins."""
        return RowPool(self)

    def read(self, pool: RowPool, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        return pool.run(chunks, every)[0]

    def verify(
        self, pool: RowPool, chunks: Sequence[Chunk], hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return pool.run(chunks, hidden=hidden)

    def keep(self, pool: RowPool, chunk: Chunk, path: Sequence[int]) -> None:
        pool.paths[chunk.pages[0]] = path

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.forward(input_ids.to(self.device), None, None, None)

    def resume(self, pool: RowPool, tokens: Sequence[int], page: int) -> int:
        return pool.resume(tokens, page)

    def usage(self, pool: RowPool, touched: int) -> Usage:
        return pool.usage()

    def why_not_drafts(self) -> str | None:
        return f"{self.description} verifies no drafts: it cannot take tokens back"


class RowPool:
    """The cache of sequences that begin together, whole prompts at a time, and of which each takes part in every step until it ends.

    Attributes:
        cache: of the engine.
        pages: of each row, its number in the scheduler's books.
        paths: of a page whose draft was verified in the last step, the accepted nodes; none for a page that is not here.
        tokens: the tokens in the cache, if it has one row and the last step succeeded; else empty.
    """

    def __init__(self, engine: RowEngine, cache: Any = None) -> None:
        self.engine = engine
        self.cache = engine.new_cache() if cache is None else cache
        self.pages: list[int] = []
        self.paths: dict[int, Sequence[int]] = {}
        self.tokens: list[int] = []
        self._mask: torch.Tensor | None = None
        self._largest = 0

    def run(
        self, chunks: Sequence[Chunk], every: bool = False, hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A step: logits after the last token of each chunk, or after `every` token.

        Returns:
            Float32 `[rows, vocab]`, and what the head reads of all tokens where `hidden` is asked for, `[tokens, hidden]`.
        """
        pages = [chunk.pages[0] for chunk in chunks]
        before, self.tokens = self.tokens, []
        if not self.pages:
            self.pages = pages
            found = self._begin(chunks, every, hidden)
            self._measure()
        else:
            if pages != self.pages:
                self._measure()
                self._drop([self.pages.index(page) for page in pages])
                self.pages = pages
            found = self._extend(chunks, every, hidden)
        if len(chunks) == 1 and chunks[0].start == len(before):
            before.extend(chunks[0].tokens)
            self.tokens = before
        return found

    def resume(self, tokens: Sequence[int], page: int) -> int:
        """As `Engine.resume`."""
        held = self.tokens
        pairs = zip(held, tokens[:-1], strict=False)
        common = next(
            (place for place, (one, other) in enumerate(pairs) if one != other), min(len(held), len(tokens) - 1)
        )
        if common and self.engine.rewind(self.cache, len(held) - common):
            self.pages, self.tokens = [page], held[:common]
            return common
        self.cache = self.engine.new_cache()
        self.pages, self.tokens, self._mask = [], [], None
        return 0

    def _begin(self, chunks: Sequence[Chunk], every: bool, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids, self._mask, positions = pad_left([chunk.tokens for chunk in chunks], self.engine.device)
        return flat(*self._pass(ids, positions, self._mask, not every, hidden))

    def _extend(self, chunks: Sequence[Chunk], every: bool, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chunks of the same length."""
        count = len(chunks[0].tokens)
        numbers = [[list(c.tokens) for c in chunks], [list(range(c.start, c.start + count)) for c in chunks]]
        ids, positions = torch.tensor(numbers, device=self.engine.device)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(chunks), count)], dim=1)
        return flat(*self._pass(ids, positions, self._mask, not every, hidden))

    def _pass(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, last_only: bool, hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[batch, seq or 1, vocab]`; of pools that give them where they are asked for, hidden states `[batch, seq, hidden]`."""
        return self.engine.forward(ids, self.cache, mask, positions, last_only), None

    def _drop(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        index = torch.tensor(rows, device=self.engine.device)
        self.engine.keep_rows(self.cache, index)
        if self._mask is not None:
            self._mask = self._mask[index]

    def _measure(self) -> None:
        self._largest = max(self._largest, self.engine.cache_bytes(self.cache))

    def usage(self) -> Usage:
        """The cache at its largest, and what a selection let steps read of it."""
        self._measure()
        reads = getattr(self.cache, "reads", None)  # of a compressed cache with a selection
        return Usage(self._largest) if reads is None else Usage(self._largest, *reads.totals)


def flat(logits: torch.Tensor, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows one after another."""
    return logits.flatten(0, 1), None if states is None else states.flatten(0, 1)


def pad_left(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Token ids, mask (1 = token, 0 = padding; None when all prompts are equally long) and positions, int64 `[batch, longest]`.

    Positions count from 0 at each prompt's own first token; padding has position 0 and id 0, which nothing attends to.
    """
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    shift = torch.tensor([[longest - len(p)] for p in prompts])
    columns = torch.arange(longest)[None, :]
    positions = (columns - shift).clamp(min=0)
    mask = (columns >= shift).long() if bool((shift > 0).any()) else None
    return ids.to(device), mask.to(device) if mask is not None else None, positions.to(device)
