"""Eviction inside the native engine: the queries of a sequence that its score looks at, and the tokens of it that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from runtime.engines.base import Chunk
from runtime.engines.native.layout import Layout, RaggedPages
from runtime.engines.native.pool import Pool
from runtime.kernels.cpu.decoder import PAGE, Step
from runtime.kv_cache.budgets.base import UniformLayers
from runtime.kv_cache.eviction import Eviction
from runtime.kv_cache.layer_state import QueryWindow, best_places
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.scores.base import Accumulating

TOGETHER = 128  # queries whose attention is added up in one go, where a score wants that of all


class CutLayers:
    """Some layers of a sequence, as `Eviction` sees the rows of one.

    Args:
        plan: of the cache.
        index: among those of the sequence.
        shape: layers, heads of keys, and of queries.

    Attributes:
        seen, arrived: tokens that have come, and so many of each row.
        held: int64 `[layers, kv_heads]`, of them, those in the cache.
        sums: float32 `[layers, kv_heads, n]`, what each got of the queries since the last eviction that the score looks at.
        queries: how many these are.
        places: int64 `[layers, kv_heads, most]`, numbers of the tokens that stay, and `counts` of them of each head; None: all do.
    """

    chunks = 1

    def __init__(self, plan: CachePlan, index: int, shape: tuple[int, int, int]) -> None:
        assert plan.eviction is not None
        self.index, self.storage = index, plan.storage
        self.share: torch.Tensor | None = None
        self.seen = self.queries = 0
        self.arrived = torch.zeros(shape[0], dtype=torch.int64)
        self.held = torch.zeros(shape[:2], dtype=torch.int64)
        self.places: torch.Tensor | None = None
        self.counts = self.held
        self._query_heads = shape[2]
        self._accumulates = plan.eviction.accumulates
        self.sums, self._mass = (torch.zeros(*shape[:2], 0) for _ in range(2))

    @property
    def notes(self) -> CutLayers | None:
        """What is noted of each token: what it has gathered."""
        return self if self._accumulates else None

    def note(self, name: str) -> torch.Tensor | None:
        """As of `LayerState`; there is nothing but "mass"."""
        if not self._accumulates:
            return None
        return functional.pad(self._mass, (0, int(self.held.max()) - self._mass.shape[-1]))

    def begin(self, seen: int, held: torch.Tensor, sums: torch.Tensor, queries: int) -> None:
        """Tokens are about to be evicted."""
        self.seen, self.held, self.sums, self.queries = seen, held, sums, queries
        self.places, self.counts = None, held
        self.arrived.fill_(seen)

    def set_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token by now."""
        self._mass = mass

    def observe(self, window: int) -> Observation:
        """What the queries see of the cache."""
        count = int(self.held.max())
        shape = *self.held.shape, count
        empty, queries = torch.empty(*shape, 0), torch.empty(shape[0], self._query_heads, self.queries, 0)
        ages = self.held.unsqueeze(-1) - 1 - torch.arange(count)
        pinned, mass = self.storage.prefix, self.note("mass")
        return Observation(queries, empty, empty, ages, 1.0, 0.0, self.index, pinned, mass, sums=self.sums[..., :count])

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As of `LayerState`: notes which tokens stay."""
        if bool((counts >= self.counts).all()):
            return score
        places, wanted = best_places(score, counts)
        self.places = places if self.places is None else self.places.gather(-1, places)
        self.counts = counts
        if self._accumulates:
            self._mass = self._mass.gather(-1, places).masked_fill(~wanted, 0.0)
        return score.gather(-1, places).masked_fill(~wanted, float("-inf"))

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
        shape: layers, heads of keys, and of queries.

    Attributes:
        ragged: where tokens lie, once layers and heads have different numbers of them.
    """

    def __init__(self, plan: CachePlan, prompt: int, shape: tuple[int, int, int]) -> None:
        assert plan.eviction is not None
        rule = plan.eviction
        self.evicted = 0
        self.boundary: int | None = prompt
        self.moves = not rule.is_even
        self.ragged: RaggedPages | None = None
        self._rule, self._storage, self._prompt, self._shape = rule, plan.storage, prompt, shape
        self._sums_up = isinstance(rule.score, Accumulating)  # so that queries need not be remembered
        # Budgets of layers that are alike are those of rows that are cut together.
        count = 1 if isinstance(rule.layers, UniformLayers) else shape[0]
        self._parts = [CutLayers(plan, index, (shape[0] // count, *shape[1:])) for index in range(count)]
        self._eviction = Eviction(rule, count)
        self._held, self._since = torch.zeros(shape[:2], dtype=torch.int64), 0  # tokens after the last eviction
        self._sums, self._summed = torch.zeros(*shape[:2], 0), 0  # by position, and of how many queries
        self._queries = QueryWindow()
        self._remembered = 0
        self._computed: _Computed | None = None

    @property
    def left(self) -> int:
        """As of `runtime.engines.base.Retention`."""
        assert self.boundary is not None
        return self._left(self.boundary, self.boundary - self.evicted)

    def _left(self, arrived: int, slots: int) -> int:
        """Of so many slots those that are taken once tokens have been evicted, at most."""
        if not self.moves:
            return self._rule.left(arrived, slots, self._storage)
        # Of a head the first page that is its own is not full, nor is the last one of all, nor are those that heads share out.
        mean = self._rule.most_left(arrived, self._storage)
        return min(slots, self._packed_tail + mean + 3 * PAGE) + self._lead * PAGE

    @property
    def _lead(self) -> int:
        """Pages of the oldest tokens that stay plain."""
        return -(-self._storage.prefix // PAGE) if self._storage.tiers else 0

    @property
    def _packed_tail(self) -> int:
        """Newest tokens whose pages cannot be packed: those that may be seen plain."""
        return self._storage.recent + 1 if self._storage.tiers else 0

    @property
    def own(self) -> int:
        """Tokens before the boundary whose queries the score looks at."""
        assert self.boundary is not None
        return min(self.boundary, max(1, self._rule.score.window(self.boundary)))

    def most(self, new: int) -> int:
        """As of `runtime.engines.base.Retention`."""
        whole, interval = self._prompt + new, self._rule.interval
        last, late = (self._prompt, new) if interval is None else (whole, min(new, interval))
        late += self._storage.chunk if self._storage.tiers else 0  # what is cut by less is not cut to whole chunks
        if not self.moves:
            return min(whole, max(self._prompt, self._rule.left(last, last, self._storage) + late))
        # What stays is put beside all that was there.
        before = self._prompt, min(whole, self._left(last, last) + late)
        after = self._left(self._prompt, self._prompt), 0 if interval is None else self._left(last, last)
        return max(sum(-(-slots // PAGE) * PAGE for slots in each) for each in zip(before, after, strict=True))

    # ---------------------------------------------------------------- queries
    def observed(self, chunk: Chunk) -> range:
        """Of the tokens of a chunk, those whose queries are wanted."""
        if self.boundary is None:
            return range(0)
        return range(max(0, self.boundary - self.own - chunk.start), len(chunk.tokens))

    def remember(self, chunk: Chunk, queries: torch.Tensor) -> None:
        """The queries of the tokens of a chunk that are `observed`, float32 `[layers, tokens, heads, head_dim]`."""
        self._computed = _Computed(chunk.start, range(len(chunk.tokens)), self.observed(chunk).start, queries)

    def keep(self, chunk: Chunk, path: Sequence[int]) -> None:
        """As `Engine.keep`: what stays of the last step."""
        step = self._computed
        if step is not None:
            before = chunk.start - step.start
            step.rows = [*range(before), *(before + each for each in path)]

    def settle(self, pool: Pool, pages: Sequence[int], end: int) -> None:
        """So many tokens of the sequence are in the cache for good: said before the next step, and before some are evicted."""
        step, self._computed = self._computed, None
        if step is None:
            return
        rows = [row - step.first for row in step.rows[: end - step.start] if row >= step.first]
        self._queries.append(step.queries[:, rows].transpose(1, 2), self.own)
        self._remembered += len(rows)
        while self._sums_up and self._remembered >= TOGETHER:  # the same queries together, however they come
            rest = self._remembered - TOGETHER
            self._add(pool, pages, end - rest, self._queries.newest(self._remembered)[:, :, :TOGETHER])
            self._forget(rest)

    def _add(self, pool: Pool, pages: Sequence[int], end: int, queries: torch.Tensor) -> None:
        """Add to the sums what queries give, `[layers, heads, n, head_dim]`, the last of them that of the last of `end` tokens."""
        count, slots = queries.shape[2], end - self.evicted
        width = slots if self.ragged is None else slots + self.ragged.layout.farthest
        self._sums = functional.pad(self._sums, (0, max(0, -(-width // PAGE) * PAGE - self._sums.shape[-1])))
        self._summed += count
        pool.receive(pages, range(slots - count, slots), queries.transpose(1, 2).contiguous(), self._sums, self.ragged)

    def _forget(self, window: int) -> None:
        self._queries.forget(window)
        self._remembered = min(self._remembered, window)

    def _positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where tokens are, int64 `[layers, kv_heads, n]`, as heads count; they are numbered in the order of arrival."""
        return tokens if self.ragged is None else self.ragged.layout.positions(tokens)

    # ---------------------------------------------------------------- eviction
    @torch.inference_mode()
    def evict(self, pool: Pool, pages: Sequence[int], into: Sequence[int]) -> bool:
        """As `Engine.evict`."""
        end, rule = self.boundary, self._rule
        assert end is not None
        self.settle(pool, pages, end)
        count = self._remembered if self._sums_up else min(self._remembered, self.own)
        if count:
            self._add(pool, pages, end, self._queries.newest(count))
        held = self._held + (end - self._since)
        moved = False
        if self.moves or rule.accumulates or self.left < end - self.evicted:
            self._choose(end, held)
            moved = any(part.places is not None for part in self._parts)
        if moved:
            self._move(pool, pages, into, held)
        else:
            self._held = held
        self._since = end
        self._sums, self._summed = self._sums[..., :0], 0
        self.boundary = None if rule.interval is None else end + rule.interval
        wanted = 0 if self._sums_up or rule.interval is None else rule.score.window(end) - rule.interval
        self._forget(max(0, wanted))
        return moved

    def _choose(self, end: int, held: torch.Tensor) -> None:
        """Let the rule choose which of the tokens stay, so many of each head; `end`: that have come."""
        tokens = torch.arange(int(held.max())).expand(*held.shape, -1)
        sums = functional.pad(self._sums, (0, max(0, tokens.shape[-1] - self._sums.shape[-1])))
        sums = sums.gather(-1, self._positions(tokens).clamp(max=sums.shape[-1] - 1))
        size = len(held) // len(self._parts)
        for part, own, mass in zip(self._parts, held.split(size), sums.split(size), strict=True):
            part.begin(end, own, mass, self._summed)
        for part in self._parts:
            if end == self._prompt:
                self._eviction.after_prompt(part)
            else:
                assert self._rule.interval is not None
                self._eviction.after_step(part, self._rule.interval)

    def _move(self, pool: Pool, pages: Sequence[int], into: Sequence[int], held: torch.Tensor) -> None:
        """Gather the tokens that stay, of so many of each head."""
        end = self.boundary
        assert end is not None
        counts = torch.cat([part.counts for part in self._parts])
        most, slots = int(counts.max()), end - self.evicted
        all_tokens = torch.arange(int(held.max())).expand(*held.shape, -1)
        chosen = [
            tokens[..., :most]
            if part.places is None
            else functional.pad(part.places, (0, most - part.places.shape[-1]))
            for part, tokens in zip(self._parts, all_tokens.split(len(held) // len(self._parts)), strict=True)
        ]
        source, target = self._positions(torch.cat(chosen)), torch.arange(most).expand(*counts.shape, most)
        new: RaggedPages | None = None
        if self.moves:
            layout = Layout.of(counts, self._lead, self._packed_tail, pool.arenas)
            new, target, left = layout.structure(into, pool.count, pool.arenas), layout.positions(target), layout.slots
        else:
            left = most
        if left > self.left or not (self.moves or bool((counts == left).all())):
            raise RuntimeError("eviction leaves another number of tokens than it says")  # a mistake in this room
        pool.copy(pages, into[: -(-left // PAGE)], source, target, slots, left, counts, (self.ragged, new))
        self.ragged, self.evicted, self._held = new, end - left, counts


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
    """Let a step record queries; `shape` as of `SequenceRetention`."""
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
