"""Eviction inside the native engine: the queries of a sequence that its score looks at, and the tokens of it that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from runtime.engines.base import Chunk
from runtime.engines.native.pool import Pool
from runtime.kernels.cpu.decoder import PAGE, Step
from runtime.kv_cache.eviction import Eviction
from runtime.kv_cache.layer_state import QueryWindow, best_places
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.scores.base import Accumulating

TOGETHER = 128  # queries whose attention is added up in one go, where a score wants that of all


class SequenceLayers:
    """All layers of a sequence, as `Eviction` sees the rows of one: every head of each has as many tokens.

    Args:
        plan: of the cache.
        shape: layers, heads of keys, and of queries.

    Attributes:
        seen, arrived: tokens that have come, and so many of each row. held: of them, those in the cache.
        sums: float32 `[layers, kv_heads, slots]`, what each got of the queries since the last eviction that the score looks at.
        queries: how many these are.
        places: int64 `[layers, kv_heads, left]`, slots of what stays; None: all does.
    """

    index, chunks = 0, 1

    def __init__(self, plan: CachePlan, shape: tuple[int, int, int]) -> None:
        assert plan.eviction is not None
        self.storage = plan.storage
        self.share: torch.Tensor | None = None
        self.seen = self.held = self.queries = 0
        self.arrived = torch.zeros(shape[0], dtype=torch.int64)
        self.places: torch.Tensor | None = None
        self._layers, self._heads, self._query_heads = shape
        self._accumulates = plan.eviction.accumulates
        self.sums, self._mass = (torch.zeros(self._layers, self._heads, 0) for _ in range(2))

    @property
    def notes(self) -> SequenceLayers | None:
        """What is noted of each token: what it has gathered."""
        return self if self._accumulates else None

    def note(self, name: str) -> torch.Tensor | None:
        """As of `LayerState`; there is nothing but "mass"."""
        return functional.pad(self._mass, (0, self.held - self._mass.shape[-1])) if self._accumulates else None

    def begin(self, seen: int, held: int) -> None:
        """Tokens are about to be evicted."""
        self.seen, self.held, self.places = seen, held, None
        self.arrived.fill_(seen)

    def set_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token by now."""
        self._mass = mass

    def observe(self, window: int) -> Observation:
        """What the queries see of the cache."""
        shape = self._layers, self._heads, self.held
        empty, queries = torch.empty(*shape, 0), torch.empty(self._layers, self._query_heads, self.queries, 0)
        ages = torch.arange(self.held - 1, -1, -1).expand(shape)
        mass, sums = self.note("mass"), self.sums[..., : self.held]
        return Observation(queries, empty, empty, ages, 1.0, pinned=self.storage.prefix, mass=mass, sums=sums)

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As of `LayerState`: notes which tokens stay."""
        self.places = places = best_places(score, counts)[0]
        if self._accumulates:
            self._mass = self._mass.gather(-1, places)
        return score.gather(-1, places)

    def forget_queries(self, window: int) -> None:
        """The sequence does."""

    def settle(self) -> None:
        """Nothing is stored otherwise."""


@dataclass
class _Computed:
    """Queries of the last step, of which some may be taken back.

    Attributes:
        start: position of the step's first token. rows: its tokens that stay, if so many do. first: the first that was recorded.
        queries: float32 `[layers, recorded, heads, head_dim]`.
    """

    start: int
    rows: Sequence[int]
    first: int
    queries: torch.Tensor


class SequenceRetention:
    """See `runtime.engines.base.Retention`.

    Args:
        plan: of the cache. prompt: tokens of the prompt, after which tokens are evicted for the first time.
        shape: as of `SequenceLayers`.
    """

    def __init__(self, plan: CachePlan, prompt: int, shape: tuple[int, int, int]) -> None:
        assert plan.eviction is not None
        self.evicted = 0
        self.boundary: int | None = prompt
        self._rule, self._storage, self.prompt = plan.eviction, plan.storage, prompt
        self._sums_up = isinstance(self._rule.score, Accumulating)  # so that queries need not be remembered
        self._eviction, self._layers = Eviction(self._rule, 1), SequenceLayers(plan, shape)
        self._queries = QueryWindow()
        self._remembered = 0
        self._computed: _Computed | None = None

    @property
    def left(self) -> int:
        """Tokens that stay at the boundary."""
        assert self.boundary is not None
        return self._rule.left(self.boundary, self.boundary - self.evicted, self._storage)

    @property
    def own(self) -> int:
        """Tokens before the boundary whose queries the score looks at."""
        assert self.boundary is not None
        return min(self.boundary, max(1, self._rule.score.window(self.boundary)))

    def most(self, new: int) -> int:
        """As of `runtime.engines.base.Retention`."""
        whole, interval = self.prompt + new, self._rule.interval
        last, late = (self.prompt, new) if interval is None else (whole, min(new, interval))
        late += self._storage.chunk if self._storage.tiers else 0  # what is cut by less is not cut to whole chunks
        return min(whole, max(self.prompt, self._rule.left(last, last, self._storage) + late))

    # ---------------------------------------------------------------- queries
    def observed(self, chunk: Chunk) -> range:
        """Of the tokens of a chunk, those whose queries are wanted."""
        if self.boundary is None:
            return range(0)
        return range(max(0, self.boundary - self.own - chunk.start), len(chunk.tokens))

    def remember(self, pool: Pool, chunk: Chunk, queries: torch.Tensor) -> None:
        """The queries of the tokens of a chunk that are `observed`, float32 `[layers, tokens, heads, head_dim]`."""
        self._settle(pool, chunk.pages, chunk.start)
        self._computed = _Computed(chunk.start, range(len(chunk.tokens)), self.observed(chunk).start, queries)

    def keep(self, chunk: Chunk, path: Sequence[int]) -> None:
        """As `Engine.keep`: what stays of the last step."""
        step = self._computed
        if step is not None:
            before = chunk.start - step.start
            step.rows = [*range(before), *(before + each for each in path)]

    def _settle(self, pool: Pool, pages: Sequence[int], end: int) -> None:
        """So many tokens of the sequence are in the cache for good."""
        step, self._computed = self._computed, None
        if step is None:
            return
        rows = [row - step.first for row in step.rows[: end - step.start] if row >= step.first]
        self._queries.append(step.queries[:, rows].transpose(1, 2), self.own)
        self._remembered += len(rows)
        if self._sums_up and self._remembered >= TOGETHER:
            self._add(pool, pages, end)

    def _add(self, pool: Pool, pages: Sequence[int], end: int) -> None:
        """Add to the sums what the remembered queries give, the last of them that of the last of `end` tokens."""
        layers, held = self._layers, end - self.evicted
        count = self._remembered if self._sums_up else min(self._remembered, self.own)
        layers.sums = functional.pad(layers.sums, (0, max(0, -(-held // PAGE) * PAGE - layers.sums.shape[-1])))
        layers.queries += count
        if count:
            queries = self._queries.newest(count).transpose(1, 2).contiguous()
            pool.receive(pages, range(held - count, held), queries, layers.sums)
        if self._sums_up:
            self._forget(0)

    def _forget(self, window: int) -> None:
        self._queries.forget(window)
        self._remembered = min(self._remembered, window)

    # ---------------------------------------------------------------- eviction
    @torch.inference_mode()
    def evict(self, pool: Pool, pages: Sequence[int], into: Sequence[int]) -> None:
        """As `Engine.evict`."""
        end, left, rule, layers = self.boundary, self.left, self._rule, self._layers
        assert end is not None
        self._settle(pool, pages, end)
        self._add(pool, pages, end)
        layers.begin(end, end - self.evicted)
        if left < layers.held or rule.accumulates:
            if end == self.prompt:
                self._eviction.after_prompt(layers)
            else:
                assert rule.interval is not None
                self._eviction.after_step(layers, rule.interval)
        if left < layers.held:
            if layers.places is None or layers.places.shape[-1] != left:
                raise RuntimeError("eviction leaves another number of tokens than it says")  # a mistake in this room
            pool.copy(pages, into, layers.places, range(left), layers.held)
            self.evicted = end - left
        layers.sums, layers.queries = layers.sums[..., :0], 0
        self.boundary = None if rule.interval is None else end + rule.interval
        self._forget(0 if self.boundary is None else max(0, rule.score.window(end) - (rule.interval or 0)))


class Observed(NamedTuple):
    """Queries of a step that evictions will ask for.

    Attributes:
        chunks: that have some, each with its sequence's retention.
        queries: of each, float32 `[layers, rows, heads, head_dim]`; the step writes them.
        rows: int32, of the step.
    """

    chunks: list[tuple[SequenceRetention, Chunk]]
    queries: Sequence[torch.Tensor]
    rows: torch.Tensor


def record(step: Step, chunks: Sequence[Chunk], shape: tuple[int, int, int], head_dim: int) -> Observed:
    """Let a step record queries; `shape` as of `SequenceLayers`."""
    found: list[tuple[SequenceRetention, Chunk]] = []
    wanted: list[range] = []
    before = 0
    for chunk in chunks:
        if isinstance(chunk.retention, SequenceRetention):
            rows = chunk.retention.observed(chunk)
            if rows:
                found.append((chunk.retention, chunk))
                wanted.append(range(before + rows.start, before + rows.stop))
        before += len(chunk.tokens)
    if not found:
        return Observed(found, (), torch.empty(0))
    numbers = torch.tensor([row for rows in wanted for row in rows], dtype=torch.int32)
    queries = torch.empty(shape[0], len(numbers), shape[2], head_dim)
    step.observed, step.queries, step.observed_count = numbers.data_ptr(), queries.data_ptr(), len(numbers)
    return Observed(found, queries.split([len(rows) for rows in wanted], 1), numbers)
