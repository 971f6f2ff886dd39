"""Early exit: the target's first layers draft, under its own norm and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch

from runtime.config.settings import ConfigError, Count, Share, settings_of
from runtime.drafting.config.target import Target
from runtime.drafting.draft_cache import Slot
from runtime.drafting.drafters.base import Ask, Draw, Place, Text, Verified
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.sublayers import ViewCache, ViewDrafter, engine_of
from runtime.drafting.rates import Rates
from runtime.engines.native.recorder import Recorder
from runtime.engines.native.sublayers import View
from runtime.sampling.tree import Tree

_PRIOR = 2.0  # tokens that the rates of all sequences count as in those of one
_KEEP_ALL = 0.995  # as `EarlyExit.keep`, over all sequences
_ROWS = 8  # of a round, that are looked at
_RAREST = 16  # times `EarlyExit.every`, between looks where no exit pays


@dataclass(eq=False)
class ExitSlot(Slot):
    """A sequence.

    Attributes:
        rates: of the exits. wait: rounds until all exits are looked at. pause: rounds from the last look to that.
        draw: how its tokens are drawn. chosen: the exit that drafts in this round.
        recorded: the states that the verification records, for this place; None: none.
    """

    rates: Rates = field(default_factory=lambda: Rates(_PRIOR))
    wait: int = 0
    pause: int = 0
    draw: Draw | None = None
    chosen: int = 0
    recorded: tuple[Recorder, Place] | None = None


@dataclass(eq=False)
class EarlyExit(ViewDrafter):
    """The first layers of the target, as many each time; no training. It is good where the target was trained to be (LayerSkip).

    Source: Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding, arXiv 2404.16710.

    Attributes:
        layer: how many layers draft; auto: chosen anew for every draft (DEL, arXiv 2504.05598), as the other fields say.
        exits: With auto: most layers that are considered, evenly spread.
        every: With auto: rounds between looks at all exits; each look reads the head for every exit. Where no exit pays nothing is
            drafted but one token with each look, and looks become rarer.
        keep: With auto: share of a token's weight that is left when another was seen.
    """

    name: ClassVar[str] = "early-exit"
    layer: Count | Literal["auto"] = "auto"
    exits: Count = 8
    every: Count = 4
    keep: Share = 0.95

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> ViewDrafter:
        engine = engine_of(target, cls.name)
        layers, layer = len(engine.parts.blocks), settings.pop("layer")
        if layers < 2:
            raise ConfigError((), f"the model has {layers} layer; an early exit needs at least 2")
        candidates = Candidates(engine.vocab_size)
        if layer == "auto":
            return DynamicExit(cache=ViewCache(View(engine, range(1))), candidates=candidates, **settings)
        for key in ("exits", "every", "keep"):
            if settings.pop(key) != settings_of(cls)[key].default:
                raise ConfigError((key,), "is for an exit that is chosen anew for every draft; leave it out, or layer")
        if layer >= layers:
            text = f"an early exit is after layer 1 to {layers - 1} of this model's {layers}, not {layer}"
            raise ConfigError(("layer",), text)
        cache = ViewCache(View(engine, range(layer)))
        return cls(cache=cache, candidates=candidates, layer=layer, **settings)

    def describe(self) -> str:
        return f"{self.name} after layer {self.layer}"


@dataclass(eq=False)
class DynamicExit(EarlyExit):
    """An early exit that is chosen anew for every draft.

    Every few rounds the verification, which runs all layers anyway, also records the state after each; the head then says what a draft
    of only these layers would have proposed, and the sequence whether that is right. Each round the exit and the length are those that
    promise the most tokens for the weights they read.

    Source: Entezari Zarch et al., DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding, arXiv 2504.05598.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cache = cast(ViewCache, self.cache)
        engine = self._cache.view.engine
        layers = len(engine.parts.blocks)
        #: Layers after which a draft may end.
        self.layers = spread(layers - 1, min(self.exits, layers - 1))
        self._views = [View(engine, range(layer)) for layer in self.layers]
        whole = View(engine, range(layers)).weight_bytes
        self.costs = [view.weight_bytes / whole for view in self._views]
        self._first = [layer / layers for layer in self.layers]
        self.reset()

    def reset(self) -> None:
        self._rates = Rates(_PRIOR, _KEEP_ALL)

    def begin(self, text: Text) -> ExitSlot:
        return ExitSlot(rates=Rates(_PRIOR, self.keep, parent=self._rates))

    # ---------------------------------------------------------------- before a verification
    def limits(self, asks: Sequence[Ask]) -> list[int]:
        limits = super().limits(asks)
        slots: list[ExitSlot] = [ask.state for ask in asks]
        rates = [[slot.rates.rate(place, first) for place, first in enumerate(self._first)] for slot in slots]
        chosen, depth = choose(rates, limits, self.costs)
        if not depth:
            chosen, _ = choose(rates, [1] * len(asks), self.costs, plain=False)
        self._cache.view = self._views[chosen]
        found = []
        for ask, slot, limit in zip(asks, slots, limits, strict=True):
            slot.chosen, slot.draw, slot.recorded = chosen, ask.draw, None
            looks = slot.wait <= 0 < limit
            if looks:
                pool = slot.place.pool
                pool.recorder = pool.recorder or Recorder()
                slot.recorded = pool.recorder, slot.place
                slot.pause = self.every if depth else min(max(2 * slot.pause, self.every), _RAREST * self.every)
                slot.wait = slot.pause
            slot.wait -= 1
            found.append(min(limit, depth or int(looks)))
        return found

    # ---------------------------------------------------------------- after it
    def learn(self, state: ExitSlot, verified: Verified) -> None:
        states = None
        if state.recorded is not None:
            recorder, place = state.recorded
            states, state.recorded = recorder.of(place.pages, place.start), None
        if states is not None:
            state.memory = None
            self._look(state, verified, states)
        else:
            super().learn(state, verified)

    def judge(self, state: ExitSlot, drafted: Tree, verified: Verified) -> None:
        accepted = len(verified.path)
        # What was accepted, and the one that was not, unless all of them were.
        for right in [1.0] * accepted + [0.0] * (accepted < len(verified.tree)):
            state.rates.add(state.chosen, right)

    @torch.inference_mode()
    def _look(self, state: ExitSlot, verified: Verified, states: torch.Tensor) -> None:
        """What every exit would have proposed for the new tokens.

        Args:
            states: `[layers, 1 + len(tree), hidden]`.
        """
        rows = [0, *(1 + node for node in verified.path)][: min(len(verified.new), _ROWS)]
        wanted = states[[layer - 1 for layer in self.layers]][:, rows]
        logits = self._cache.view.head(wanted.flatten(0, 1)).unflatten(0, wanted.shape[:2])
        if state.draw is None:
            following = torch.tensor(verified.new[: len(rows)])
            right = (logits.argmax(-1) == following).float()
        else:
            heat = state.draw.options.temperature
            p, q = torch.softmax(verified.logits[rows] / heat, -1), torch.softmax(logits / heat, -1)
            right = torch.minimum(p[..., : q.shape[-1]], q[..., : p.shape[-1]]).sum(-1)
        for place, found in enumerate(right.tolist()):
            for each in found:
                state.rates.add(place, each)

    def describe(self) -> str:
        return f"{self.name} after one of layers {', '.join(map(str, self.layers))}"


def choose(
    rates: Sequence[Sequence[float]], limits: Sequence[int], costs: Sequence[float], plain: bool = True
) -> tuple[int, int]:
    """The exit and the number of tokens to draft that promise the most tokens for what is read.

    Args:
        rates: of each sequence, of each exit, how likely a drafted token is right where those before it are.
        limits: of each sequence, most tokens.
        costs: of a drafted token of each exit, in passes of the whole target.
        plain: it may be 0 tokens, where none promises more than plain decoding.
    """
    best, found = float(len(rates)) if plain else 0.0, (0, 0)
    for place, cost in enumerate(costs):
        expected = float(len(rates))
        reach = [1.0] * len(rates)
        for depth in range(1, max(limits, default=0) + 1):
            for index, limit in enumerate(limits):
                reach[index] *= rates[index][place] if depth <= limit else 0.0
            expected += sum(reach)
            if expected / (1 + depth * cost) > best:
                best, found = expected / (1 + depth * cost), (place, depth)
    return found


def spread(last: int, count: int) -> list[int]:
    """`count` of the layers 1 to `last`, evenly, the last among them."""
    return sorted({max(1, round(last * (index + 1) / count)) for index in range(count)})
