"""Cascade of draft models (S2D): one that is not sure of a token asks the next, deeper one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.config.settings import ConfigError, Fraction, built
from runtime.drafting.config.target import UnfitError
from runtime.drafting.draft_cache import DraftCache
from runtime.drafting.drafters.base import Ask, Drafter
from runtime.drafting.drafters.composition import Composed
from runtime.drafting.drafters.draft_model import DraftModel
from runtime.drafting.drafters.model import Candidates, Chain, FromDraft, ModelDrafter
from runtime.engines.base import Chunk
from runtime.engines.native.sublayers import View, parts_of
from runtime.sampling.tree import Tree
from runtime.system.describe import is_integer


@dataclass(eq=False)
class Cascade(FromDraft, Composed):
    """The first model drafts token after token; one that it gives less than `sure` is asked of the next model, and so on; the last one's
    word stands. Nested drafts (one model whose first layers are drafts too) are drafted with so: deeper where it is needed.

    Source: Kavehzadeh et al., S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested Large Language Models, arXiv
    2407.01955, with a threshold for each of its sub-models.

    Attributes:
        drafters: the models, the cheapest first; each must propose the same ids. Weights that they share are counted with one of them.
        sure: probability of a token from which on no further model is asked.
    """

    name: ClassVar[str] = "nested"
    fact: ClassVar[str | None] = "depths"

    drafters: Sequence[ModelDrafter] = built()
    sure: Fraction = 0.6

    @classmethod
    def over(cls, draft: DraftModel, directory: Path, candidates: Candidates, **settings: Any) -> Drafter:
        """A cascade over the depths that the draft was trained at: its first layers are drafts by themselves."""
        depths, layers = draft.facts.get("depths"), draft.facts.get("layers")
        if not isinstance(depths, list) or not all(is_integer(each) for each in depths):
            depths = []
        if len(depths) < 2 or depths != sorted(set(depths)) or depths[0] < 1 or depths[-1] != layers:
            raise ConfigError(("method",), f"{directory} was not trained at several depths; use chain")
        engine = parts_of(draft.engine)
        if isinstance(engine, str):
            raise UnfitError(("method",), f"nested: {engine}")
        shallow = [ModelDrafter(DraftCache(_Depth(engine, depth)), candidates) for depth in depths[:-1]]
        return cls(
            [*shallow, ModelDrafter(DraftCache(engine), candidates, weights=draft.engine.weight_bytes)], **settings
        )

    def describe(self) -> str:
        return self.name

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        self.overhead = self.drafters[0].read_far([ask.state[0] for ask in asks], [ask.text.tokens for ask in asks])
        return [self._chain(ask) for ask in asks]

    def _chain(self, ask: Ask) -> Tree:
        chain, goes_on = Chain(ask), True
        while goes_on:
            goes_on = chain.add(*self._next(chain))
        return chain.tree

    def _next(self, chain: Chain) -> tuple[int, float]:
        """The next token and how likely it is. Which model answers is decided before anything is drawn."""
        tokens, found = [*chain.ask.text.tokens, *chain.tree.tokens], None
        for model, slot in zip(self.drafters, chain.ask.state, strict=True):
            self.overhead += model.read_far([slot], [tokens])
            model.catch_up([slot], [tokens[:-1]])
            (logits,) = model.cache.feed([slot], [tokens[-1:]])
            sure = 0.0 if model is self.drafters[-1] else self.sure
            found = model.candidates.next_if_sure(logits, chain, sure)
            if found is not None:
                break
        assert found is not None, "the last model always answers"
        return found


class _Depth:
    """The first layers of a draft as an engine of their own, for a draft cache."""

    def __init__(self, engine: Any, depth: int) -> None:
        self._engine, self._view = engine, View(engine, range(depth))
        self.page_size, self.page_bytes = engine.page_size, engine.page_bytes
        self.most_rows, self.logits_width = engine.most_rows, engine.logits_width

    def make_memory(self, count: int) -> Any:
        return self._engine.make_memory(count)

    def step(self, pool: Any, chunks: Sequence[Chunk]) -> torch.Tensor:
        return self._view.read(pool, chunks)
