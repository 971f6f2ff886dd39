"""Recycled attention: what a step with full attention looked at is what the steps after it read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runtime.config.settings import Count, Natural
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.region import Chosen, Queries
from runtime.kv_cache.selection.base import Budget, Selection
from runtime.kv_cache.selection.layout import Layout, best, between, with_ends


@dataclass(frozen=True)
class RecycledAttention(Budget):
    """Full attention now and then; the steps between read the tokens that had most of it (Recycled Attention, arXiv 2411.05787).

    In a step of several tokens it is what the first looked at: the others may be drafts.

    Attributes:
        stride: tokens from one step with full attention to the next.
        recent: newest tokens, which are always read; with fewer than `stride` there are tokens between that no step reads until the
            next full one.
    """

    name: ClassVar[str] = "recycled"
    stride: Count = 50
    recent: Natural = 64

    def begin(self, layers: int) -> RecycledAttentionSelection:
        return RecycledAttentionSelection(self, layers)


class RecycledAttentionSelection(Selection[RecycledAttention]):
    """Tokens that the layers of one cache looked at last, and what steps read by them."""

    def __init__(self, options: RecycledAttention, layers: int) -> None:
        super().__init__(options, layers)
        self._seen = [0] * layers  # tokens that had come when a layer last looked

    def _choose(self, layer: LayerState, queries: Queries, layout: Layout) -> list[Chosen | None] | None:
        recent = max(self.options.recent, queries.count)
        picked: Chosen | None = self._recall(layer, layout)
        # (With fewer tokens than then, the one that looked was taken back.)
        if picked is None or not 0 < layer.seen - self._seen[layer.index] < self.options.stride:
            self._seen[layer.index] = layer.seen
            looked = queries.counted is None or bool(queries.counted.any(1).all())
            # A row that had no token in this step has not looked: all do so again in the next.
            self._known[layer.index] = self._look(layout, queries, recent) if looked else None
            return None
        return layout.chosen(with_ends(picked, layout.lengths, 0, recent))

    def _look(self, layout: Layout, queries: Queries, recent: int) -> Chosen:
        """Tokens with most attention, as many as are read beside the newest; they may be among these now, and are not later."""
        first, lengths = queries.first(), layout.lengths - queries.later
        votes = first.votes(layout.logits(first), lengths)
        votes = votes.masked_fill(~between(lengths, votes.shape[1], 0, 0), float("-inf"))
        counts = (self.options.counts(lengths) - recent).clamp(min=0)
        return best(votes, counts, max(0, self.options.most(layout.longest) - recent))
