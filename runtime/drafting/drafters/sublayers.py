"""Drafters that are a part of their target: they compute with its own weights, and what it has cached they need not read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.draft_cache import Slot
from runtime.drafting.drafters.base import Ask, Place, Text
from runtime.drafting.drafters.model import ModelDrafter
from runtime.engines.base import Chunk
from runtime.engines.native.engine import LlamaEngine
from runtime.engines.native.sublayers import View, parts_of
from runtime.sampling.tree import Tree


@dataclass(eq=False)
class Spot(Slot):
    """A text in the target's cache.

    Attributes:
        place: in this turn. length: tokens that are read, the drafted ones too.
    """

    place: Place | None = None
    length: int = 0

    @property
    def here(self) -> Place:
        assert self.place is not None, "a drafter inside its target is given a place with every text"
        return self.place


class ViewCache:
    """Texts that a part of the target reads on from where the target is. See `DraftCache`.

    Args:
        view: the part; may be another in the next turn.
    """

    nbytes = 0

    def __init__(self, view: View) -> None:
        self.view = view
        self.most_rows: int = view.engine.most_rows
        self.vocabulary: int = view.engine.logits_width

    def open(self) -> Spot:
        return Spot()

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        spots = [slot for slot in slots if isinstance(slot, Spot)]
        pieces = [Chunk(new, spot.length, spot.here.pages) for spot, new in zip(spots, tokens, strict=True)]
        for spot, new in zip(spots, tokens, strict=True):
            spot.length += len(new)
        return self.view.read(spots[0].here.pool, pieces)

    def cut(self, slot: Slot, length: int) -> None:
        assert isinstance(slot, Spot)
        slot.length = length

    def close(self, slot: Slot) -> None:
        assert isinstance(slot, Spot)
        slot.place = None


@dataclass(eq=False)
class Inside(ModelDrafter):
    """A chain of tokens that a part of the target proposes; what it writes to the target's cache the verification writes anew."""

    source: ClassVar[str] = "target"
    inside = True

    def begin(self, text: Text) -> Spot:
        spot = self.cache.open()
        assert isinstance(spot, Spot)
        return spot

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        trees = [Tree() for _ in asks]
        self.overhead = 0.0
        limited = []
        for ask in asks:
            ask.state.place = ask.place
            # Each drafted token is verified at a place of its own, after that of the text's last one.
            limited.append(replace(ask, depth=min(ask.depth, ask.state.here.room - 1)))
        limits = self.limits(limited)
        going = [index for index, limit in enumerate(limits) if limit > 0]
        if going:
            drafted = super().draft([replace(limited[index], depth=limits[index]) for index in going])
            for index, tree in zip(going, drafted, strict=True):
                trees[index] = tree
        return trees

    def limits(self, asks: Sequence[Ask]) -> list[int]:
        """Most tokens to draft for each."""
        return [min(ask.nodes, ask.depth) for ask in asks]


@dataclass(eq=False)
class ViewDrafter(Inside):
    """Some of the target's layers, or of their halves, draft. Nothing has to be caught up with: what they read of the text so far is what
    the target has cached.
    """

    def start(self, asks: Sequence[Ask]) -> torch.Tensor:
        slots = [ask.state for ask in asks]
        for slot in slots:
            self.cache.cut(slot, slot.here.start)
        return self.cache.feed(slots, [ask.text.tokens[-1:] for ask in asks])


# ---------------------------------------------------------------- making one
def engine_of(target: Target, name: str) -> LlamaEngine:
    """The target's engine; UnfitError where it does not compute with parts of a model."""
    engine = parts_of(target.engine)
    if isinstance(engine, str):
        raise UnfitError((), f"'{name}' drafts with layers of the model itself, and {engine}")
    return engine
