"""Layers of one sequence, as eviction sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from runtime.kv_cache.layer_state import best_places
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.scores.base import Accumulating


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
