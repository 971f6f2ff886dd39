"""Eviction: after a prompt, and every so many steps if asked, tokens beyond the budget leave the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, Protocol

import torch

from runtime.config.settings import ConfigError, Count, Settings, Share
from runtime.kv_cache.budgets.base import EqualHeads, HeadBudget, LayerBudget, LayerFacts, UniformLayers
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.pages import PageTensor
from runtime.kv_cache.scores.base import Accumulating, Score
from runtime.kv_cache.storage.plan import StoragePlan

# The part of an observation that scores may choose from where prompts stay whole: what was generated.


@dataclass(frozen=True)
class GeneratedTokens:
    """Tokens of an observation without those that came in prompts.

    Attributes:
        seen: them alone, `[batch, kv_heads, m, ...]` in the order of arrival; `ages` still count all tokens that came after each.
        places: int64 `[batch, kv_heads, m]`, where each was among all; whatever where `seen.ages` is negative.
        beside: int64 `[batch, kv_heads]`, how many tokens are left out.
    """

    seen: Observation
    places: torch.Tensor
    beside: torch.Tensor

    @classmethod
    def of(cls, whole: Observation, given: torch.Tensor) -> GeneratedTokens:
        """Leave out the tokens that are `given`, bool `[batch, kv_heads, n]`, and those that are pinned."""
        first = torch.arange(given.shape[-1], device=given.device) < whole.pinned
        wanted = whole.held & ~given & ~first
        counts = wanted.sum(-1, keepdim=True)
        longest = max(1, int(counts.max()))
        places = (~wanted).to(torch.uint8).argsort(dim=-1, stable=True)[..., :longest]
        seen = replace(
            whole,
            keys=whole.keys.take_along_dim(places.unsqueeze(-1), 2),
            values=whole.values.take_along_dim(places.unsqueeze(-1), 2),
            ages=whole.ages.gather(-1, places).masked_fill(torch.arange(longest, device=given.device) >= counts, -1),
            mass=None if whole.mass is None else whole.mass.gather(-1, places),
            positions=None if whole.positions is None else whole.positions.gather(-1, places),
            sums=None if whole.sums is None else whole.sums.gather(-1, places),
            pinned=0,
        )
        return cls(seen, places, whole.held.sum(-1) - counts[..., 0])

    def spread(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """`whole` `[batch, kv_heads, n]` with the numbers `part` `[batch, kv_heads, m]` of these tokens in their places."""
        return whole.scatter(-1, self.places, torch.where(self.seen.held, part, whole.gather(-1, self.places)))


@dataclass(frozen=True)
class EvictionPlan(Settings):
    """Tokens that are evicted, and when.

    Attributes:
        score: which tokens matter.
        layers: how the budget is spread over layers.
        heads: how a layer's budget is spread over its key heads.
        ratio: tokens that a head keeps on average, of all that its sequence has had, in (0, 1]; None where `tokens` says it.
        tokens: tokens that a head keeps on average; None where `ratio` says it.
        interval: decode steps from one eviction to the next; None: only after prompts.
        prompt: "keep": all that came in prompts stays, and the budget is about what was generated. Needs an interval and equal
            shares of layers, since other shares are found when a prompt is cut.

    Raises:
        ValueError: a number is out of its range.
        ConfigError: both or none of ratio and tokens are given, or prompts stay and nothing is ever cut, or layers differ.
    """

    score: Score
    layers: LayerBudget
    heads: HeadBudget
    ratio: Share | None = None
    tokens: Count | None = None
    interval: Count | None = None
    prompt: Literal["evict", "keep"] = "evict"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ratio is None) == (self.tokens is None):
            raise ConfigError(("tokens",), "either ratio or tokens says how much stays; give one of them")
        if self.keeps_prompt and self.interval is None:
            raise ConfigError(("prompt",), "keep needs an interval: what is generated is cut only every so many steps")
        if self.keeps_prompt and not isinstance(self.layers, UniformLayers):
            text = f"keep needs equal shares of layers: those of {self.layers.name} are found when a prompt is cut"
            raise ConfigError(("prompt",), text)

    @property
    def keeps_prompt(self) -> bool:
        """Whether all that came in prompts stays."""
        return self.prompt == "keep"

    @property
    def least(self) -> int:
        """Tokens that every head keeps: those the score always keeps, and one to choose."""
        return self.score.kept() + 1

    def left(self, arrived: int, held: int, storage: StoragePlan, given: int = 0) -> int:
        """Tokens that each head keeps of `held` when it is cut, where all keep as many.

        Args:
            arrived: tokens that have come, evicted ones too.
            held: by each head.
            storage: of the others.
            given: of a prompt that stays; nothing is stored otherwise then.
        """
        mean = self.tokens if self.ratio is None else round((arrived - given) * self.ratio)
        assert mean is not None
        least = self.least + (0 if given else storage.prefix)
        count = max(mean, least)
        if count < held - given:
            count = int(whole_chunks(torch.tensor(count), torch.tensor(least), storage))
        return given + min(held - given, count)

    @property
    def is_even(self) -> bool:
        """Whether all heads of all layers are known to keep as many tokens, whatever their scores."""
        return type(self.layers) is UniformLayers and type(self.heads) is EqualHeads and self.score.sums_only

    @property
    def sums_only(self) -> bool:
        """Whether scores and budgets ask for sums of attention and no more; see `Score.sums_only`."""
        return self.score.sums_only and self.layers.sums_only

    def most_left(self, arrived: int, storage: StoragePlan, heads: int) -> int:
        """Tokens that the heads of all layers, so many, keep on average at most, when `arrived` have come; none keeps more than it has."""
        mean = self.tokens if self.ratio is None else ceil(arrived * self.ratio)
        assert mean is not None
        own = self.score.average(mean)
        own += ceil(mean / heads) if own < mean else 0  # of heads that are different there are whole ones
        # What every head keeps at least may come on top, and rounding.
        return own + self.least + storage.prefix + 1 + (storage.chunk if storage.tiers else 0)

    @property
    def accumulates(self) -> bool:
        """Whether layers must keep sums for the score from one eviction to the next."""
        return self.interval is not None and isinstance(self.score, Accumulating)

    @property
    def notes(self) -> dict[str, PageTensor]:
        """What layers must keep of each token: "mass", what it has gathered for the score; "place", where in its sequence it was; "given",
        whether it came in a prompt."""
        parts = {"mass": PageTensor(1, torch.float32)} if self.accumulates else {}
        parts |= {"given": PageTensor(1, torch.bool)} if self.keeps_prompt else {}
        return parts | ({"place": PageTensor(1, torch.int32)} if "positions" in self.score.wants else {})


def whole_chunks(counts: torch.Tensor, least: torch.Tensor, storage: StoragePlan) -> torch.Tensor:
    """Counts of at least `least` tokens that leave none but the recent ones as floats: older ones are stored in whole chunks."""
    if not storage.tiers:
        return counts
    floats = storage.recent + storage.prefix
    rounded = floats + storage.chunk * ((counts - floats).double() / storage.chunk).round().long()
    rounded = torch.where(rounded < least, rounded + storage.chunk, rounded)
    return torch.where(counts > floats, rounded, counts)


class MassNotes(Protocol):
    """Notes of the tokens of a layer."""

    def set_mass(self, mass: torch.Tensor) -> None:
        """As of `TokenNotes`."""


class CutLayer(Protocol):
    """A layer that tokens are evicted from; its members are as those of `LayerState`."""

    index: int
    storage: StoragePlan
    chunks: int
    seen: int
    arrived: torch.Tensor
    share: torch.Tensor | None

    @property
    def notes(self) -> MassNotes | None:
        """What is noted of its tokens."""

    def note(self, name: str) -> torch.Tensor | None:
        """What is noted of every token under a name."""

    def observe(self, window: int) -> Observation:
        """What the newest `window` queries see of the cache."""

    def keep(self, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keep the best tokens of each head; returns their scores."""

    def forget_queries(self, window: int) -> None:
        """Drop all remembered queries but the newest `window`."""

    def settle(self) -> None:
        """Store older tokens as the plan says."""


class Eviction:
    """Eviction from the compressed layers of one cache.

    Args:
        plan: what is evicted.
        layers: how many layers share the budget.
    """

    def __init__(self, plan: EvictionPlan, layers: int) -> None:
        self.plan, self.layers = plan, layers
        self._prompt: dict[int, tuple[CutLayer, LayerFacts]] = {}  # of layers that this prompt has gone through
        self._steps: dict[int, int] = {}
        self._cuts = True  # whether this chunk of a sequence is cut at all; the same for all layers

    def window(self, count: int, step: bool) -> int:
        """Queries that a layer of `count` tokens must remember after a prompt, or a step."""
        if step and self.plan.interval is None:
            return 0
        return max(1, self.plan.score.window(count))

    def after_prompt(self, layer: CutLayer) -> None:
        """Cut the layer; with a cascading share the layers before it are cut again."""
        plan = self.plan
        if layer.index == 0:  # a new chunk; of one that was broken off, nothing is waited for
            self._prompt = {}
            # Tokens before it may be such that cannot be told apart any more.
            self._cuts = not (layer.storage.is_final and layer.chunks > 1)
        if not self._cuts:
            return
        if plan.keeps_prompt:
            if plan.accumulates:  # what its queries look at of what was generated before
                self._cut_generated(layer, cuts=False)
            self._forget(layer)
            return
        seen = self._observe(layer)
        self._prompt[layer.index] = layer, LayerFacts.of(plan.score(seen), plan.layers.prefer(seen))
        order = sorted(self._prompt)
        mean = self._mean(layer.arrived)
        shares = plan.layers.shares([self._prompt[index][1] for index in order], self.layers, mean, self._least(layer))
        for index, share in zip(order, shares, strict=True):
            self._prompt[index][0].share = share
        for index in order if plan.layers.cascades else [layer.index]:
            other, facts = self._prompt[index]
            kept = self._cut(other, facts.score)
            if not plan.layers.cascades:  # nobody asks for it again
                kept = kept[..., :0]
            self._prompt[index] = other, replace(facts, score=kept)
        if len(self._prompt) == self.layers:
            waiting = [other for other, _ in self._prompt.values() if other is not layer]
            self._prompt = {}
            for other in waiting if plan.layers.cascades else []:
                other.settle()
        self._forget(layer)

    def add_up(self, layer: CutLayer) -> None:
        """Add what the queries of a layer look at to what its tokens have gathered, where the score sums up; nothing is evicted."""
        if self.plan.keeps_prompt:
            self._cut_generated(layer, cuts=False)
        else:
            self._observe(layer)

    def waits(self, layer: CutLayer) -> bool:
        """Whether the layer may be cut again before the prompt is through, so that its tokens must not be stored yet."""
        return self.plan.layers.cascades and layer.index in self._prompt

    def forget(self, layer: CutLayer) -> None:
        """The layer begins anew."""
        self._steps.pop(layer.index, None)
        self._prompt.pop(layer.index, None)

    def take_back(self, layer: CutLayer, count: int) -> None:
        """Steps of `count` tokens that `after_step` has counted did not stay."""
        if layer.index in self._steps:
            self._steps[layer.index] = max(0, self._steps[layer.index] - count)

    def after_step(self, layer: CutLayer, count: int) -> None:
        """Cut the layer when its turn has come, `count` tokens, which stay, after the last step."""
        if self.plan.interval is None:
            layer.forget_queries(0)
            return
        steps = self._steps.get(layer.index, 0) + count
        self._steps[layer.index] = steps % self.plan.interval
        if steps < self.plan.interval:
            return
        if self.plan.keeps_prompt:
            self._cut_generated(layer)
        else:
            self._cut(layer, self.plan.score(self._observe(layer)))
        self._forget(layer)

    def _observe(self, layer: CutLayer) -> Observation:
        return self._gather(layer, layer.observe(self.window(layer.seen, False)))

    def _gather(self, layer: CutLayer, seen: Observation, part: GeneratedTokens | None = None) -> Observation:
        """What a score sees, its sums with what these queries add; with `part` of these tokens alone."""
        score, whole = self.plan.score, seen.mass
        seen = seen if part is None else part.seen
        if isinstance(score, Accumulating):
            added = score.added(seen)
            mass = added if seen.mass is None else seen.mass + added
            if layer.notes is not None and whole is not None:
                layer.notes.set_mass(mass if part is None else part.spread(mass, whole))
            seen = replace(seen, mass=mass)
        return seen

    def _cut_generated(self, layer: CutLayer, cuts: bool = True) -> None:
        """Evict from what was generated, and nothing that came in prompts; `cuts` False: only sums are brought up to date."""
        seen = layer.observe(self.window(layer.seen, False))
        given = layer.note("given")
        assert given is not None
        part = GeneratedTokens.of(seen, given)
        near = self._gather(layer, seen, part)
        if not cuts:
            return
        score = self.plan.score(near)
        mean = self._mean(layer.arrived - part.beside.amax(1))
        counts = part.beside + self.plan.heads.counts(score, mean, self.plan.least)
        prompt = torch.zeros_like(seen.ages, dtype=torch.float32).masked_fill(seen.held, float("inf"))
        self._keep(layer, part.spread(score, prompt.masked_fill(~seen.held, float("-inf"))), counts)

    def _mean(self, arrived: torch.Tensor) -> torch.Tensor:
        """Tokens of a head on average over the model, float64 `[batch]`, of int64 `[batch]` that have come."""
        if self.plan.tokens is not None:
            return torch.full_like(arrived, self.plan.tokens).double()
        assert self.plan.ratio is not None
        return arrived.double() * self.plan.ratio

    def _cut(self, layer: CutLayer, score: torch.Tensor) -> torch.Tensor:
        """Evict; returns the scores of what is left, in its order."""
        mean = self._mean(layer.arrived)
        if layer.share is not None:
            mean = mean * layer.share.double()
        return self._keep(layer, score, self.plan.heads.counts(score, mean, self._least(layer)))

    def _keep(self, layer: CutLayer, score: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keep as many tokens of each head, `[batch, kv_heads]`, and where older ones are stored in pages about as many."""
        # What a score keeps for ever no share may take: of equal scores the oldest would go first, which are the sinks.
        always = (score == float("inf")).sum(-1)
        there = (score > float("-inf")).sum(-1)
        counts = torch.minimum(torch.maximum(counts, always), there)
        whole = whole_chunks(counts, torch.maximum(always, counts.clamp(max=self._least(layer))), layer.storage)
        return layer.keep(score, torch.where(counts < there, torch.minimum(whole, there), counts))

    def _least(self, layer: CutLayer) -> int:
        return self.plan.least + layer.storage.prefix

    def _forget(self, layer: CutLayer) -> None:
        """Queries that the next eviction cannot want are dropped."""
        interval = self.plan.interval
        if interval is None or self.plan.accumulates:
            layer.forget_queries(0)
        else:
            layer.forget_queries(max(0, self.window(layer.seen, True) - interval))
