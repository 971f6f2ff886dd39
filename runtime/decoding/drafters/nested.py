"""A nested draft: one model whose first layers are drafts by themselves, gone down as deep as a token needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runtime.decoding.drafters.candidates import Candidates
from runtime.decoding.drafters.cascade import Cascade
from runtime.decoding.drafters.fit import UnfitError
from runtime.decoding.drafters.model import ModelDrafter
from runtime.decoding.drafters.paged_lanes import PagedLanes
from runtime.engines.base import Piece
from runtime.engines.llama_view import View, parts_of


class _Depth:
    """The first layers of a draft as an engine of their own, for lanes."""

    def __init__(self, engine: Any, depth: int) -> None:
        self._engine, self._view = engine, View(engine, range(depth))
        self.page_size, self.page_bytes = engine.page_size, engine.page_bytes
        self.most_rows, self.logits_width = engine.most_rows, engine.logits_width

    def make_memory(self, count: int) -> Any:
        return self._engine.make_memory(count)

    def step(self, pool: Any, pieces: Sequence[Piece]) -> torch.Tensor:
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
