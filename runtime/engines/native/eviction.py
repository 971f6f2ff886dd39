"""Eviction inside the native engine: the queries of a sequence that its score looks at, and the tokens of it that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from runtime.engines.base import Chunk
from runtime.engines.native.layout import Layout, RaggedPages
from runtime.engines.native.pool import Pool
from runtime.kernels.cpu.decoder import OPS, PAGE, Step
from runtime.kv_cache.budgets.base import UniformLayers
from runtime.kv_cache.eviction import Eviction, EvictionPlan
from runtime.kv_cache.layer_state import QueryWindow, best_places
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.scores.base import Accumulating


def together(rule: EvictionPlan) -> int:
    """Queries whose attention is added up in one go, where a score wants that of all: more, where keys are gathered for it."""
    return 128 if rule.sums_only else 512


class Seen(NamedTuple):
    """What scores see of some layers; see `Observation`.

    Attributes:
        queries, keys, values: of no channels where there are `sums`.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float = 1.0
    softcap: float = 0.0
    sums: torch.Tensor | None = None


class CutLayers:
    """Some layers of a sequence, as `Eviction` sees the rows of one.

    Args:
        plan: of the cache.
        index: among those of the sequence.
        shape: layers, and heads of keys.
        prompt: tokens of the prompt.

    Attributes:
        seen, arrived: tokens that have come, and so many of each row.
        held: int64 `[layers, kv_heads]`, of them, those in the cache.
        places: int64 `[layers, kv_heads, most]`, numbers of the tokens that stay, and `counts` of them of each head; None: all do.
    """

    chunks = 1

    def __init__(self, plan: CachePlan, index: int, shape: tuple[int, int], prompt: int) -> None:
        assert plan.eviction is not None
        self.index, self.storage = index, plan.storage
        self.share: torch.Tensor | None = None
        self.seen = 0
        self.arrived = torch.zeros(shape[0], dtype=torch.int64)
        self.held = self.counts = torch.zeros(shape, dtype=torch.int64)
        self.places: torch.Tensor | None = None
        self._prompt = prompt
        self._see: Callable[[], Seen] | None = None
        self._accumulates = isinstance(plan.eviction.score, Accumulating)
        self._positions = "positions" in plan.eviction.score.wants
        # Of the tokens that the last eviction has left, `_since` of the sequence had come then.
        self._since, self._left = 0, self.held
        self._mass, self._numbers = torch.zeros(*shape, 0), torch.zeros(*shape, 0, dtype=torch.int64)

    @property
    def notes(self) -> CutLayers | None:
        """What is noted of each token: what it has gathered."""
        return self if self._accumulates else None

    def note(self, name: str) -> torch.Tensor | None:
        """As of `LayerState`: "mass", "place" and "given"."""
        tokens = torch.arange(int(self.held.max()))
        if name == "given":
            return (tokens < self._prompt).expand(*self.held.shape, -1)
        if name == "mass" and self._accumulates:
            return functional.pad(self._mass, (0, len(tokens) - self._mass.shape[-1]))
        if name == "place" and self._positions:
            left = self._left.unsqueeze(-1)
            before = functional.pad(self._numbers, (0, len(tokens) - self._numbers.shape[-1]))
            return torch.where(tokens < left, before, self._since + tokens - left)
        return None

    def begin(self, seen: int, held: torch.Tensor, see: Callable[[], Seen]) -> None:
        """Tokens are about to be scored; `see` gives what of the layers scores see."""
        self.seen, self.held, self._see = seen, held, see
        self.places, self.counts = None, held
        self.arrived.fill_(seen)

    def set_mass(self, mass: torch.Tensor) -> None:
        """What has been gathered of every token by now."""
        self._mass = mass

    def observe(self, window: int) -> Observation:
        """What the queries see of the cache."""
        assert self._see is not None
        found = self._see()
        ages = self.held.unsqueeze(-1) - 1 - torch.arange(int(self.held.max()))
        return Observation(
            found.queries, found.keys, found.values, ages, found.scale, found.softcap, self.index, self.storage.prefix,
            self.note("mass"), self.note("place"), max(0, self.seen - self._prompt), sums=found.sums,
        )  # fmt: skip

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

    def end(self) -> None:
        """The tokens that do not stay are gone."""
        numbers = self.note("place")
        if numbers is not None and self.places is not None:
            self._numbers, self._left, self._since = numbers.gather(-1, self.places), self.counts, self.seen

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
        windows: of each layer, positions that its queries see; 0: all. What is no longer seen leaves when tokens of the others do.

    Attributes:
        ragged: where tokens lie, once layers and heads have different numbers of them.
    """

    def __init__(self, plan: CachePlan, prompt: int, shape: tuple[int, int, int], windows: Sequence[int]) -> None:
        assert plan.eviction is not None
        rule = plan.eviction
        self._windows = {layer: window for layer, window in enumerate(windows) if window}
        self._whole = [layer for layer, window in enumerate(windows) if not window]
        self.evicted = 0
        self.boundary: int | None = prompt + (rule.interval or 0 if rule.keeps_prompt else 0)
        # Budgets of what is generated are not such of whole chunks.
        self.moves = bool(self._windows) or not rule.is_even or (rule.keeps_prompt and bool(plan.storage.tiers))
        stays = rule.keeps_prompt and not plan.storage.tiers and not self._windows
        self.fixed = prompt // PAGE * PAGE if stays else 0
        self.ragged: RaggedPages | None = None
        self._rule, self._storage, self.prompt, self._shape = rule, plan.storage, prompt, shape
        self._sums_up = isinstance(rule.score, Accumulating)  # so that queries need not be remembered
        self._sums_only, self._together = rule.sums_only, together(rule)
        # Layers that have the same budget, and are not looked at one by one, are rows that are cut together.
        layers = len(self._whole)
        count = 1 if self._sums_only and isinstance(rule.layers, UniformLayers) else layers
        self._parts = [CutLayers(plan, index, (layers // count, shape[1]), prompt) for index in range(count)]
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
        """Slots that are taken once tokens have been evicted, at most; so many tokens have come, in so many slots."""
        given = self.prompt if self._rule.keeps_prompt else 0
        if not self.moves:
            return self._rule.left(arrived, slots, self._storage, given)
        # Of a head the first page that is its own is not full, nor is the last one of all, nor are those that heads share out.
        heads = len(self._whole) * self._shape[1]
        mean = given - self.fixed + self._rule.most_left(arrived - given, self._storage, heads)
        mean = max(mean, *self._windows.values()) if self._windows else mean
        return min(arrived, self._packed_tail + mean + 3 * PAGE) + self._lead * PAGE

    @property
    def _lead(self) -> int:
        """Pages of the oldest tokens that stay as they are."""
        return -(-self._storage.prefix // PAGE) if self._storage.tiers else self.fixed // PAGE

    @property
    def _packed_tail(self) -> int:
        """Newest tokens whose pages cannot be packed: those that may be seen plain."""
        return self._storage.recent + 1 if self._storage.tiers else 0

    @property
    def own(self) -> int:
        """Tokens before the boundary whose queries the score looks at."""
        assert self.boundary is not None
        # Queries of a prompt look at nothing of what is generated.
        most = self.boundary - (self.prompt if self._sums_up and self._rule.keeps_prompt else 0)
        return min(most, max(1, self._rule.score.window(self.boundary)))

    def most(self, new: int) -> int:
        """As of `runtime.engines.base.Retention`."""
        whole, interval = self.prompt + new, self._rule.interval
        last, late = (self.prompt, new) if interval is None else (whole, min(new, interval))
        late += self._storage.chunk if self._storage.tiers else 0  # what is cut by less is not cut to whole chunks
        if not self.moves:
            return min(whole, max(self.prompt, self._left(last, last) + late))
        # What stays is put beside all that was there.
        before = self.prompt, min(whole, self._left(last, last) + late)
        after = 1 + self._left(self.prompt, self.prompt), 0 if interval is None else 1 + self._left(last, last)
        return max(sum(-(-n // PAGE) * PAGE for n in each) - self.fixed for each in zip(before, after, strict=True))

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
        while self._sums_up and self._remembered >= self._together:  # the same queries together, however they come
            rest = self._remembered - self._together
            queries = self._queries.newest(self._remembered)[:, :, : self._together]
            if self._sums_only:
                self._add(pool, pages, end - rest, queries)
            else:
                self._show(pool, pages, end - rest, queries)
                for part in self._parts:
                    self._eviction.add_up(part)
            self._forget(rest)

    def _add(self, pool: Pool, pages: Sequence[int], end: int, queries: torch.Tensor) -> None:
        """Add to the sums what queries give, `[layers, heads, n, head_dim]`, the last of them that of the last of `end` tokens."""
        count, slots = queries.shape[2], end - self.evicted
        hidden = None
        if self._rule.keeps_prompt:
            hidden = self._positions(torch.full((*self._shape[:2], 1), self.prompt)).contiguous()
        width = slots if self.ragged is None else slots + self.ragged.layout.farthest
        self._sums = functional.pad(self._sums, (0, max(0, -(-width // PAGE) * PAGE - self._sums.shape[-1])))
        self._summed += count
        if count:
            queries = queries.transpose(1, 2).contiguous()
            pool.receive(pages, range(slots - count, slots), queries, self._sums, self.ragged, hidden)

    def _show(self, pool: Pool, pages: Sequence[int], end: int, queries: torch.Tensor) -> None:
        """Let the layers be seen by queries, `[layers, heads, n, head_dim]`, the last of them that of the last of `end` tokens."""
        held = self._held + (end - self._since)

        def see(layer: int) -> Seen:
            tokens = torch.arange(int(held[layer].max())).expand(*held.shape, -1)
            tokens = torch.minimum(tokens, held.unsqueeze(-1) - 1)
            block = pool.blocks[layer]
            attend = next(op.attend for op in block.ops[: block.count] if OPS[op.kind] == "attend")
            keys, values = pool.tokens(pages, layer, self._positions(tokens)[layer], end - self.evicted, self.ragged)
            return Seen(queries[layer : layer + 1], keys[None], values[None], attend.scale, attend.softcap)

        for layer, part in zip(self._whole, self._parts, strict=True):
            part.begin(end, held[layer : layer + 1], partial(see, layer))

    def _show_sums(self, end: int) -> None:
        """Let the layers be seen by what `end` tokens have got of all queries that were added."""
        held = self._held + (end - self._since)
        places = self._positions(torch.arange(int(held.max())).expand(*held.shape, -1))
        sums = self._sums.gather(-1, places.clamp(max=self._sums.shape[-1] - 1))
        held, sums = held[self._whole], sums[self._whole]
        size = len(held) // len(self._parts)
        for part, mine, mass in zip(self._parts, held.split(size), sums.split(size), strict=True):
            most = int(mine.max())
            states = torch.empty(*mine.shape, most, 0)
            queries = torch.empty(size, self._shape[2], self._summed, 0)
            part.begin(end, mine, partial(Seen, queries, states, states, sums=mass[..., :most]))

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
        queries = self._queries.newest(count) if count else torch.empty(self._shape[0], self._shape[2], 0, 0)
        held, moved = self._held + (end - self._since), False
        if self.moves or self._sums_up or self.left < end - self.evicted:
            if self._sums_only:
                self._add(pool, pages, end, queries)
                self._show_sums(end)
            else:
                self._show(pool, pages, end, queries)
            for part in self._parts:
                if end == self.prompt:
                    self._eviction.after_prompt(part)
                else:
                    assert rule.interval is not None
                    self._eviction.after_step(part, rule.interval)
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

    def _move(self, pool: Pool, pages: Sequence[int], into: Sequence[int], held: torch.Tensor) -> None:
        """Gather the tokens that stay, of so many of each head."""
        end = self.boundary
        assert end is not None
        counts = held.clone()
        counts[self._whole] = torch.cat([part.counts for part in self._parts])
        for layer, window in self._windows.items():
            counts[layer] = held[layer].clamp(max=window)
        most, slots = int(counts.max()), end - self.evicted
        target = torch.arange(most).expand(*counts.shape, most)
        chosen = target + (held - counts).unsqueeze(-1)  # the newest
        for part, layers in zip(self._parts, _split(self._whole, len(self._parts)), strict=True):
            if part.places is not None:
                chosen[layers] = functional.pad(part.places, (0, most))[..., :most]
        source = self._positions(chosen)
        new: RaggedPages | None = None
        if self.moves:
            layout = Layout.of(counts, self._lead, self._packed_tail, pool.arenas, [*self._windows])
            new, target, left = layout.structure(into, pool.count, pool.arenas), layout.positions(target), layout.slots
        else:
            left = most
        for part in self._parts:
            part.end()
        if left > self.left or not (self.moves or bool((counts == left).all())):
            raise RuntimeError("eviction leaves another number of tokens than it says")  # a mistake in this room
        if self.fixed:  # they are there
            source, target, counts = source[..., self.fixed :], target[..., self.fixed :], counts - self.fixed
        pool.copy(pages, into[: -(-left // PAGE)], source, target, slots, left, counts, (self.ragged, new))
        self.ragged, self.evicted, self._held = new, end - left, counts + self.fixed


def _split(layers: list[int], count: int) -> list[list[int]]:
    size = len(layers) // count
    return [layers[size * part : size * part + size] for part in range(count)]


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
