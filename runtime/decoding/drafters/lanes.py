"""Texts in the cache of a draft model: each lane holds what the model has read of one text, and can be cut back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(eq=False)
class Lane:
    """One text.

    Attributes:
        tokens: ids that are in the cache, in order. notes: nodes of a tree that were read after them.
        unsure: how many tokens after them an unpaged cache holds that were not kept.
        pages: that hold them (paged engines). cache: that holds them (others).
    """

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cache: Any = None
    notes: list[int] = field(default_factory=list)
    unsure: int = 0


@runtime_checkable
class Lanes(Protocol):
    """The cache of a draft model.

    Attributes:
        most_rows: tokens of a pass.
        vocabulary: width of the logits.
    """

    most_rows: int
    vocabulary: int

    def open(self) -> Lane:
        """An empty one."""

    def feed(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read more of each text; logits after the last token of each, float32 `[lanes, vocab]`."""

    def cut(self, lane: Lane, length: int) -> None:
        """Forget all but the first `length` tokens."""

    def close(self, lane: Lane) -> None:
        """Give its memory back."""

    @property
    def nbytes(self) -> int:
        """Memory of the caches."""


@runtime_checkable
class AheadLanes(Lanes, Protocol):
    """Lanes that also read what may follow a text."""

    def ahead(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], more: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Read more of each text, at least one token, and tokens that may follow it: logits after the last of the text's and after each
        of these, a float32 `[1 + more, vocab]` for each lane. `keep` says which stay; without it none does.
        """

    def keep(self, lane: Lane, tokens: Sequence[int]) -> None:
        """The first of those that `ahead` read after the text belong to it."""


@runtime_checkable
class TreeLanes(Lanes, Protocol):
    """Lanes that also read trees of what may follow a text."""

    def branch(
        self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Tokens of a tree after what each lane holds: the last `len(tokens)` of `parents`, the others were given before. Logits after
        each, a float32 `[tokens, vocab]` for each lane. The lanes themselves do not grow. Of a lane there are at most `most_rows` tokens.
        """


def lanes_of(engine: Any) -> Lanes:
    """All that an engine can: `TreeLanes` where it computes trees, else `AheadLanes`."""
    from runtime.decoding.drafters.paged_lanes import PagedAheadLanes, PagedTreeLanes
    from runtime.decoding.drafters.plain_lanes import PlainLanes

    if not hasattr(engine, "make_memory"):
        return PlainLanes(engine)
    return PagedTreeLanes(engine) if getattr(engine, "trees", False) else PagedAheadLanes(engine)
