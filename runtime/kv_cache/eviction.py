"""Eviction: after a prompt, and every so many steps if asked, tokens beyond the budget leave the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.kv_cache.budgets.base import HeadShare, LayerFacts, LayerShare
from runtime.kv_cache.scores.base import Score

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

    def window(self, count: int) -> int:
        """Queries that a layer of `count` tokens must remember."""
        return max(1, self.plan.score.window(count))

    def after_prompt(self, layer: CompressedLayer, scale: float, softcap: float) -> None:
        """Cut the layer; with a cascading share the layers before it are cut again."""
        plan = self.plan
        seen = layer.observe(self.window(layer.seen), scale, softcap)
        self._prompt[layer.index] = layer, LayerFacts(plan.score(seen), plan.layer_share.prefer(seen))
        order = sorted(self._prompt)
        shares = plan.layer_share.shares([self._prompt[index][1] for index in order], self.layers)
        for index, share in zip(order, shares, strict=True):
            self._prompt[index][0].share = share
        for index in order if plan.layer_share.cascades else [layer.index]:
            other, facts = self._prompt[index]
            kept = self._cut(other, facts.score)
            if not plan.layer_share.cascades:  # nobody asks for it again
                kept = kept[..., :0]
            self._prompt[index] = other, LayerFacts(kept, facts.preference)
        if len(self._prompt) == self.layers:
            self._prompt = {}
        self._forget(layer)

    def after_step(self, layer: CompressedLayer, scale: float, softcap: float) -> None:
        """Cut the layer when its turn has come."""
        if self.plan.interval is None:
            layer.forget_queries(0)
            return
        steps = self._steps.get(layer.index, 0) + 1
        self._steps[layer.index] = steps % self.plan.interval
        if steps < self.plan.interval:
            return
        seen = layer.observe(self.window(layer.seen), scale, softcap)
        self._cut(layer, self.plan.score(seen))
        self._forget(layer)

    def _cut(self, layer: CompressedLayer, score: torch.Tensor) -> torch.Tensor:
        """Evict; returns the scores of what is left, in its order."""
        plan = self.plan
        arrived = layer.arrived
        if plan.tokens is not None:
            mean = torch.full_like(arrived, plan.tokens).double()
        else:
            mean = arrived.double() * (1.0 if plan.ratio is None else plan.ratio)
        if layer.share is not None:
            mean = mean * layer.share.double()
        counts = plan.head_share.counts(score, mean.round().long(), plan.least)
        return layer.keep(score, counts)

    def _forget(self, layer: CompressedLayer) -> None:
        """Queries that the next eviction cannot want are dropped."""
        interval = self.plan.interval
        layer.forget_queries(0 if interval is None else max(0, self.window(layer.seen) - interval))
