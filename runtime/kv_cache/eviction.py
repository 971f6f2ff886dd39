"""Eviction: after a prompt, and every so many steps if asked, tokens beyond the budget leave the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.kv_cache.budgets.base import HeadShare, LayerFacts, LayerShare
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.pages import Part
from runtime.kv_cache.scores.base import Accumulating, Placed, Score

if TYPE_CHECKING:
    from runtime.kv_cache.layer import CompressedLayer


@dataclass(frozen=True)
class EvictionPlan:
    """What is evicted and when.

    Attributes:
        score: which tokens matter.
        layer_share: what each layer may keep.
        head_share: what each head of a layer may keep.
        ratio: tokens that a head keeps on average, of all that its sequence has had; None where `tokens` says it.
        tokens: tokens that a head keeps on average; None where `ratio` says it.
        interval: decode steps from one eviction to the next; None: only after prompts.
    """

    score: Score
    layer_share: LayerShare
    head_share: HeadShare
    ratio: float | None = None
    tokens: int | None = None
    interval: int | None = None

    @property
    def least(self) -> int:
        """Tokens that every head keeps: those the score always keeps, and one to choose."""
        return self.score.kept() + 1


class Eviction:
    """Evicts from the compressed layers of one cache.

    Args:
        plan: what is evicted.
        layers: how many layers share the budget.
    """

    def __init__(self, plan: EvictionPlan, layers: int) -> None:
        self.plan, self.layers = plan, layers
        self._prompt: dict[int, tuple[CompressedLayer, LayerFacts]] = {}  # of layers that this prompt has gone through
        self._steps: dict[int, int] = {}
        self._cuts = True  # whether this piece of a text is cut at all; the same for all layers

    @property
    def accumulates(self) -> bool:
        """Whether layers must keep sums for the score from one eviction to the next."""
        return self.plan.interval is not None and isinstance(self.plan.score, Accumulating)

    @property
    def notes(self) -> dict[str, Part]:
        """What layers must keep of each token for the score: "mass", what it has gathered; "place", where in its sequence it was."""
        parts = {"mass": Part(1, torch.float32)} if self.accumulates else {}
        return parts | ({"place": Part(1, torch.int32)} if isinstance(self.plan.score, Placed) else {})

    def window(self, count: int, step: bool) -> int:
        """Queries that a layer of `count` tokens must remember after a prompt, or a step."""
        if step and self.plan.interval is None:
            return 0
        return max(1, self.plan.score.window(count))

    def after_prompt(self, layer: CompressedLayer, scale: float, softcap: float) -> None:
        """Cut the layer; with a cascading share the layers before it are cut again."""
        plan = self.plan
        if layer.index == 0:  # a new piece; of one that was broken off, nothing is waited for
            self._prompt = {}
            self._cuts = not layer.is_final
        if not self._cuts:
            return
        seen = self._observe(layer, scale, softcap)
        self._prompt[layer.index] = layer, LayerFacts(plan.score(seen), plan.layer_share.prefer(seen))
        order = sorted(self._prompt)
        mean = self._mean(layer)
        shares = plan.layer_share.shares(
            [self._prompt[index][1] for index in order], self.layers, mean, self._least(layer)
        )
        for index, share in zip(order, shares, strict=True):
            self._prompt[index][0].share = share
        for index in order if plan.layer_share.cascades else [layer.index]:
            other, facts = self._prompt[index]
            kept = self._cut(other, facts.score)
            if not plan.layer_share.cascades:  # nobody asks for it again
                kept = kept[..., :0]
            self._prompt[index] = other, LayerFacts(kept, facts.preference)
        if len(self._prompt) == self.layers:
            waiting = [other for other, _ in self._prompt.values() if other is not layer]
            self._prompt = {}
            for other in waiting if plan.layer_share.cascades else []:
                other.settle(scale, softcap)
        self._forget(layer)

    def waits(self, layer: CompressedLayer) -> bool:
        """Whether the layer may be cut again before the prompt is through, so that its tokens must not be stored yet."""
        return self.plan.layer_share.cascades and layer.index in self._prompt

    def forget(self, layer: CompressedLayer) -> None:
        """The layer begins anew."""
        self._steps.pop(layer.index, None)
        self._prompt.pop(layer.index, None)

    def after_step(self, layer: CompressedLayer, count: int, scale: float, softcap: float) -> None:
        """Cut the layer when its turn has come, `count` tokens after the last step."""
        if self.plan.interval is None:
            layer.watched.forget(0)
            return
        steps = self._steps.get(layer.index, 0) + count
        self._steps[layer.index] = steps % self.plan.interval
        if steps < self.plan.interval:
            return
        self._cut(layer, self.plan.score(self._observe(layer, scale, softcap)))
        self._forget(layer)

    def _observe(self, layer: CompressedLayer, scale: float, softcap: float) -> Observation:
        score = self.plan.score
        seen = layer.observe(self.window(layer.seen, False), scale, softcap)
        if isinstance(score, Accumulating):
            added = score.added(seen)
            seen = seen.with_mass(added if seen.mass is None else seen.mass + added)
            if self.accumulates:
                assert seen.mass is not None
                layer.remember_mass(seen.mass)
        return seen

    def _mean(self, layer: CompressedLayer) -> torch.Tensor:
        """Tokens of a head on average over the model, float64 `[batch]`."""
        plan, arrived = self.plan, layer.arrived
        if plan.tokens is not None:
            return torch.full_like(arrived, plan.tokens).double()
        return arrived.double() * (1.0 if plan.ratio is None else plan.ratio)

    def _cut(self, layer: CompressedLayer, score: torch.Tensor) -> torch.Tensor:
        """Evict; returns the scores of what is left, in its order."""
        plan = self.plan
        mean = self._mean(layer)
        if layer.share is not None:
            mean = mean * layer.share.double()
        counts = plan.head_share.counts(score, mean.round().long(), self._least(layer))
        there = (score > float("-inf")).sum(-1)
        counts = torch.where(counts < there, torch.minimum(self._whole(layer, counts), there), counts)
        return layer.keep(score, counts)

    def _whole(self, layer: CompressedLayer, counts: torch.Tensor) -> torch.Tensor:
        """Counts that leave nothing but the recent tokens as floats: what is stored otherwise is stored in whole pages."""
        storage = layer.storage
        if not storage.tiers:
            return counts
        floats = storage.recent + storage.prefix
        pages = ((counts - floats).double() / storage.chunk).round().long()
        rounded = floats + storage.chunk * pages
        rounded = torch.where(rounded < self._least(layer), rounded + storage.chunk, rounded)
        return torch.where(counts > floats, rounded, counts)

    def _least(self, layer: CompressedLayer) -> int:
        return self.plan.least + layer.storage.prefix

    def _forget(self, layer: CompressedLayer) -> None:
        """Queries that the next eviction cannot want are dropped."""
        interval = self.plan.interval
        if interval is None or self.accumulates:
            layer.watched.forget(0)
        else:
            layer.watched.forget(max(0, self.window(layer.seen, True) - interval))
