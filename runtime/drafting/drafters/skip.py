"""Self-speculation: the target drafts for itself with some of its attention and feed-forward halves left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runtime.config.settings import ConfigError, Natural, Probability, Share
from runtime.drafting.config.target import Target
from runtime.drafting.draft_cache import Slot
from runtime.drafting.drafters.base import Verified
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.sublayers import ViewCache, ViewDrafter, engine_of
from runtime.engines.native.sublayers import View
from runtime.sampling.tree import Tree


@dataclass(eq=False)
class Skip(ViewDrafter):
    """Self-speculative decoding: the target without some sublayers drafts until it is unsure. How sure it must be follows the acceptance:
    a little surer where fewer tokens are accepted than wanted, a little less where more are.

    Source: Zhang et al., Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding, arXiv 2309.08168.

    Attributes:
        skip_attention: layers whose attention is left out, counted from 0. skip_mlp: those whose feed-forward half is.
        confidence: a chain ends at a token of less probability than this, at first; it then changes with the acceptance.
        accepted: share of drafted tokens that shall be.
        change: of the confidence, in one round; 0: it stays.
        memory: share of what was accepted so far in the smoothed share. inertia: share of the confidence that a round leaves.
    """

    name: ClassVar[str] = "skip"
    skip_attention: tuple[Natural, ...] = ()
    skip_mlp: tuple[Natural, ...] = ()
    confidence: Probability = 0.6
    accepted: Share = 0.9
    change: Probability = 0.01
    memory: Probability = 0.5
    inertia: Probability = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first = self.confidence
        self.reset()

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> Skip:
        engine = engine_of(target, cls.name)
        layers = len(engine.parts.blocks)
        skipped = {key: check_layers(key, settings[key], layers) for key in ("skip_attention", "skip_mlp")}
        left = 2 * layers - sum(map(len, skipped.values()))
        if left == 2 * layers:
            text = "nothing is skipped; name layers in skip_attention or skip_mlp (a recipe's draft: {method: skip} finds good ones)"
            raise ConfigError((), text)
        if not left:
            raise ConfigError((), f"all {layers} layers are skipped; something must be left to draft with")
        view = View(engine, range(layers), *skipped.values())
        return cls(cache=ViewCache(view), candidates=Candidates(engine.vocab_size), **{**settings, **skipped})

    def reset(self) -> None:
        self.confidence, self._rate = self._first, self.accepted

    def judge(self, state: Slot, drafted: Tree, verified: Verified) -> None:
        self._rate = self.memory * self._rate + (1 - self.memory) * len(verified.path) / len(verified.tree)
        if self._rate <= self.accepted:
            wanted = self.confidence + self.change
        else:  # a draft that was as long as it might be would not be longer for less confidence
            wanted = self.confidence - (self.change if drafted.chances[-1] < self.confidence else 0.0)
        self.confidence = min(max(self.inertia * self.confidence + (1 - self.inertia) * wanted, 0.0), 1 - self.change)

    def describe(self) -> str:
        return f"{self.name} of {len(self.skip_attention)} attention and {len(self.skip_mlp)} feed-forward halves"


def check_layers(key: str, layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Ascending; ConfigError unless they are distinct layers of `count`."""
    for place, layer in enumerate(layers):
        if layer >= count:
            raise ConfigError((key, place), f"the model has layers 0 to {count - 1}, not {layer}")
        if layer in layers[:place]:
            raise ConfigError((key, place), f"layer {layer} is named twice")
    return tuple(sorted(layers))
