"""Several draft models, from the cheapest to the best: who is not sure of a token asks the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from runtime.config.ranges import Range, bounded, check_bounds
from runtime.drafting.caches.lanes import PagedLanes
from runtime.drafting.config.target import UnfitError
from runtime.drafting.drafters.base import Ask, Drafter, Text
from runtime.drafting.drafters.model import Candidates, ModelDrafter
from runtime.engines.base import Chunk
from runtime.engines.native.sublayers import View, parts_of
from runtime.sampling.tree import Tree


@dataclass(eq=False)
class Cascade(Drafter):
    """The first model drafts token after token; one that it gives less than `sure` is asked of the next model, and so on; the last one's
    word stands. Nested drafts (one model whose first layers are drafts too) are drafted with so: deeper where it is needed.

    Source: Kavehzadeh et al., S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested Large Language Models, arXiv
    2407.01955, with a threshold for each of its sub-models.

    Attributes:
        models: the cheapest first; each must propose the same ids.
        sure: probability of a token from which on no further model is asked.
    """

    name: ClassVar[str] = "nested"
    draws = True

    models: Sequence[ModelDrafter]
    sure: float = bounded(0.6, Range(0, 1))
    asked: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_bounds(self)
        if len(self.models) < 2:
            raise ValueError("nested.models must be at least two")
        self.vocabulary = self.models[0].vocabulary
        self.asked = [0] * len(self.models)

    def begin(self, text: Text) -> Any:
        return [model.begin(text) for model in self.models]

    def end(self, state: Any) -> None:
        for model, own in zip(self.models, state, strict=True):
            model.end(own)

    @property
    def memory_bytes(self) -> int:
        # Views of one model share its weights, which are counted with the last.
        return self.models[-1].weights + sum(model.lanes.nbytes for model in self.models)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        self.overhead = self.models[0].read_far([ask.state[0] for ask in asks], [ask.text.tokens for ask in asks])
        return [self._chain(ask) for ask in asks]

    def _chain(self, ask: Ask) -> Tree:
        tree, reach = Tree(), 1.0
        while len(tree) < min(ask.nodes, ask.depth):
            token, chance, proposal = self._next(ask, tree)
            if proposal is not None:
                tree.proposals[len(tree) - 1] = proposal
            tree.add(token, len(tree) - 1, chance)
            reach *= chance
            if reach < ask.least:
                break
        return tree

    def _next(self, ask: Ask, tree: Tree) -> tuple[int, float, torch.Tensor | None]:
        """A token, how likely it is, and what it was drawn from. Who is asked is decided before anything is drawn."""
        text = [*ask.text.tokens, *tree.tokens]
        for place, (model, lane) in enumerate(zip(self.models, ask.state, strict=True)):
            self.overhead += model.read_far([lane], [text])
            model.catch_up([lane], [text[:-1]])
            logits = model.lanes.feed([lane], [text[-1:]])
            self.asked[place] += 1
            last = place == len(self.models) - 1
            if ask.draw is None:
                tokens, chances = model.candidates.best(logits, 1)
                if last or chances[0][0] >= self.sure:
                    return tokens[0][0], chances[0][0], None
                continue
            q = model.candidates.distribution(logits[0], ask.draw, text)
            if last or float(q.max()) >= self.sure:
                (token,) = model.candidates.draw(q, ask.draw)
                return token, float(q[token]), q
        raise AssertionError("the last model always answers")


# A nested draft: one model whose first layers are drafts by themselves, gone down as deep as a token needs.


class _Depth:
    """The first layers of a draft as an engine of their own, for lanes."""

    def __init__(self, engine: Any, depth: int) -> None:
        self._engine, self._view = engine, View(engine, range(depth))
        self.page_size, self.page_bytes = engine.page_size, engine.page_bytes
        self.most_rows, self.logits_width = engine.most_rows, engine.logits_width

    def make_memory(self, count: int) -> Any:
        return self._engine.make_memory(count)

    def step(self, pool: Any, pieces: Sequence[Chunk]) -> torch.Tensor:
        return self._view.read(pool, pieces)


def nested(engine: Any, depths: Sequence[int], candidates: Candidates, weights: int, **settings: Any) -> Cascade:
    """A cascade over the depths of one draft.

    Args:
        engine: of the whole draft, the decoder in C.
        depths: numbers of first layers, ascending; the last is all of them.
        candidates, weights: as of `ModelDrafter`.
        settings: of `Cascade`.

    Raises:
        UnfitError: the engine cannot compute with parts of a model.
    """
    own = parts_of(engine)
    if isinstance(own, str):
        raise UnfitError(("method",), f"nested: {own}")
    shallow = [ModelDrafter(PagedLanes(_Depth(own, depth)), candidates) for depth in depths[:-1]]
    return Cascade([*shallow, ModelDrafter(PagedLanes(own), candidates, weights=weights)], **settings)
