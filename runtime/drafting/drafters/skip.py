"""The target drafts for itself with some of its attention and feed-forward halves left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.config.fields import PolicyError
from runtime.config.ranges import SHARE, Range, bounded
from runtime.drafting.drafters.base import Ask, Verified
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.sublayers import WHERE, Spot, ViewDrafter, ViewLanes, engine_of, settings_of
from runtime.sampling.tree import Tree

if TYPE_CHECKING:
    from runtime.drafting.config.build import Target

_FROM_ZERO = Range(0, 1, open_high=True)


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
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    confidence: float = bounded(0.6, _FROM_ZERO)
    accepted: float = bounded(0.9, SHARE)
    change: float = bounded(0.01, _FROM_ZERO)
    memory: float = bounded(0.5, _FROM_ZERO)
    inertia: float = bounded(0.9, _FROM_ZERO)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first = self.confidence
        self.reset()

    def reset(self) -> None:
        self.confidence, self._rate = self._first, self.accepted
        self._ended: dict[Spot, tuple[list[int], bool]] = {}

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        trees = super().draft(asks)
        for ask, tree in zip(asks, trees, strict=True):
            if len(tree):
                self._ended[ask.state] = (tree.tokens, tree.chances[-1] < self.confidence)
        return trees

    def learn(self, state: Any, verified: Verified) -> None:
        tokens, unsure = self._ended.pop(state, ([], False))
        count = len(verified.tree)
        if not count or verified.tree.tokens != tokens[:count]:  # others may have proposed it
            return
        self._rate = self.memory * self._rate + (1 - self.memory) * len(verified.path) / count
        if self._rate <= self.accepted:
            wanted = self.confidence + self.change
        else:  # a draft that was as long as it might be would not be longer for less confidence
            wanted = self.confidence - (self.change if unsure else 0.0)
        self.confidence = min(max(self.inertia * self.confidence + (1 - self.inertia) * wanted, 0.0), 1 - self.change)

    def end(self, state: Any) -> None:
        self._ended.pop(state, None)
        super().end(state)

    def describe(self) -> str:
        return f"{self.name} of {len(self.skip_attention)} attention and {len(self.skip_mlp)} feed-forward halves"


def build(target: Target, settings: Mapping[str, Any]) -> Skip:
    """The drafter of `{"method": "skip", ...}`.

    Raises:
        RequestError: the engine does not compute with parts of a model, or these cannot be left out.
    """
    from runtime.engines.native.sublayers import View

    engine = engine_of(target, Skip.name)
    values = settings_of(Skip, settings)
    layers = len(engine.parts.blocks)
    for key in ("skip_attention", "skip_mlp"):
        values[key] = check_layers(key, values[key], layers)
    left = 2 * layers - len(values["skip_attention"]) - len(values["skip_mlp"])
    if left == 2 * layers:
        raise PolicyError(
            (),
            "nothing is skipped; name layers in skip_attention or skip_mlp (a recipe's draft: {method: skip} finds good ones)",
            WHERE,
        )
    if not left:
        raise PolicyError((), f"all {layers} layers are skipped; something must be left to draft with", WHERE)
    view = View(engine, range(layers), values["skip_attention"], values["skip_mlp"])
    return Skip(lanes=ViewLanes(view), candidates=Candidates(engine.vocab_size), **values)


def check_layers(key: str, layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Ascending; PolicyError unless they are distinct layers of `count`."""
    for place, layer in enumerate(layers):
        if layer >= count:
            raise PolicyError((key, place), f"the model has layers 0 to {count - 1}, not {layer}", WHERE)
        if layer in layers[:place]:
            raise PolicyError((key, place), f"layer {layer} is named twice", WHERE)
    return tuple(sorted(layers))
