"""Drafters that are a part of their target: they compute with its own weights, and what it has cached they need not read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from runtime.drafting.config.target import Target, UnfitError
from runtime.drafting.draft_cache import DraftCache, Slot
from runtime.drafting.drafters.base import Ask, Verified, drafted_where
from runtime.drafting.drafters.model import ModelDrafter
from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.sublayers import View, parts_of
from runtime.sampling.tree import Tree


class ViewCache(DraftCache):
    """Sequences that a part of the target reads on from where the target is, in the target's own cache.

    Args:
        view: the part; may be another in the next turn.
    """

    def __init__(self, view: View) -> None:
        super().__init__(view.engine)
        self.view = view

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        chunks = []
        for slot, new in zip(slots, tokens, strict=True):
            chunks.append(Chunk(new, slot.length, slot.place.pages))
            slot.length += len(new)
        return self.view.read(slots[0].place.pool, chunks)


@dataclass(eq=False)
class SublayerDrafter(ModelDrafter):
    """A chain of tokens that a part of the target proposes; what it writes to the target's cache the verification writes anew."""

    source: ClassVar[str] = "target"
    inside = True

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        self.overhead = 0.0
        limited = []
        for ask in asks:
            assert ask.place is not None, "a drafter inside its target is given a place with every sequence"
            ask.state.place = ask.place
            # Each drafted token is verified at a place of its own, after that of the last one.
            limited.append(replace(ask, depth=min(ask.depth, ask.place.room - 1)))
        limited = [replace(ask, depth=limit) for ask, limit in zip(limited, self.limits(limited), strict=True)]
        trees = drafted_where(limited, lambda ask: ask.depth > 0, super().draft)
        for ask, tree in zip(asks, trees, strict=True):
            ask.state.memory = tree
        return trees

    def learn(self, state: Any, verified: Verified) -> None:
        drafted, state.memory = state.memory or Tree(), None
        count = len(verified.tree)
        if count and verified.tree.tokens == drafted.tokens[:count]:  # others may have proposed it
            self.judge(state, drafted, verified)

    def judge(self, state: Any, drafted: Tree, verified: Verified) -> None:
        """What became of a draft of its own, of which the first nodes were verified."""

    def limits(self, asks: Sequence[Ask]) -> list[int]:
        """Most tokens to draft for each."""
        return [min(ask.nodes, ask.depth) for ask in asks]


@dataclass(eq=False)
class ViewDrafter(SublayerDrafter):
    """Some of the target's layers, or of their halves, draft. Nothing has to be caught up with: what they read of the sequence so
    far is what the target has cached.
    """

    def start(self, asks: Sequence[Ask]) -> torch.Tensor:
        slots = [ask.state for ask in asks]
        for slot in slots:
            slot.length = slot.place.start
        return self.cache.feed(slots, [ask.text.tokens[-1:] for ask in asks])


def engine_of(target: Target, name: str) -> NativeEngine:
    """The target's engine; UnfitError where it does not compute with parts of a model."""
    engine = parts_of(target.engine)
    if isinstance(engine, str):
        raise UnfitError((), f"'{name}' drafts with layers of the model itself, and {engine}")
    return engine
