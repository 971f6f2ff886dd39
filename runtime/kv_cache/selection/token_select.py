"""TokenSelect: all heads vote which tokens to read, and a vote holds while queries stay alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from runtime.kv_cache.region import Chosen, Region
from runtime.kv_cache.selection.base import Queries, Selection
from runtime.kv_cache.selection.places import Budget, Layout, Picked, Watch, best, between, sequences, with_ends

if TYPE_CHECKING:
    from runtime.kv_cache.layer import CompressedLayer


@dataclass(frozen=True)
class TokenSelect(Budget):
    """Heads of a layer read the tokens that get most attention, summed over all of them (TokenSelect, arXiv 2411.02886).

    Every head's weights add up to 1, so that none outvotes the others by large scores. A sequence keeps its tokens until a query is
    less like the one they were chosen for than `similarity`; sinks and the newest tokens, which it reads too, move on.

    Attributes:
        similarity: cosine, of all heads' queries together, from which on tokens are chosen anew.
        sinks: first tokens, which are always read.
        recent: newest tokens, likewise.
        skip_layers: first layers, which read everything.
    """

    name: ClassVar[str] = "token-select"
    needs_aligned: ClassVar[bool] = True
    similarity: float = 0.9
    sinks: int = 4
    recent: int = 32
    skip_layers: int = 2

    def begin(self, layers: int) -> TokenSelectSelection:
        return TokenSelectSelection(self, layers)


@dataclass
class _Vote:
    """What one layer's sequences read: the queries it was chosen for `[batch, heads * q * size]`, and the tokens, `[batch, ...]`."""

    queries: torch.Tensor
    picked: Picked


class TokenSelectSelection(Selection[TokenSelect]):
    """At work in one cache.

    Args:
        options: the recipe's.
        layers: how many.

    Attributes:
        reads: what steps read; the votes read keys besides, those of the sequences that choose anew.
        votes: for each layer how often sequences chose anew.
    """

    def __init__(self, options: TokenSelect, layers: int) -> None:
        super().__init__(options, layers)
        self.votes = [0] * layers
        self._watches = [Watch() for _ in range(layers)]
        self._held: list[_Vote | None] = [None] * layers

    def nbytes(self, index: int) -> int:
        vote = self._held[index]
        return 0 if vote is None else vote.queries.untyped_storage().nbytes() + vote.picked.nbytes

    def _choose(self, layer: CompressedLayer, queries: Queries, regions: list[Region]) -> list[Chosen | None]:
        options, layout = self.options, Layout(regions)
        if layer.index < options.skip_layers or options.most(layout.longest) >= layout.longest:
            return [None] * len(regions)
        batch, heads = layer.shape
        void = self._watches[layer.index].void(layer, regions)
        vote = None if void else self._held[layer.index]
        # What was aligned stays so until tokens leave.
        held = layout.lengths
        lengths = sequences(layer, held, options.name) if vote is None else held.view(batch, heads)[:, 0]
        recent = max(options.recent, queries.count)
        flat = queries.states.reshape(batch, -1)
        if vote is None or vote.queries.shape != flat.shape:
            again = torch.arange(batch, device=flat.device)
        else:
            alike = torch.cosine_similarity(flat.float(), vote.queries.float(), dim=-1)
            again = (~(alike >= options.similarity)).nonzero().flatten()
        if len(again):
            self.votes[layer.index] += len(again)
            picked = self._elect(layout, queries, again, lengths[again], recent, heads)
            fresh = _Vote(flat[again].clone(), picked)
            vote = fresh if vote is None or len(again) == batch else _updated(vote, again, fresh)
            self._held[layer.index] = vote
        assert vote is not None
        return layout.chosen(with_ends(vote.picked, lengths, options.sinks, recent).per_head(heads))

    def _elect(
        self,
        layout: Layout,
        queries: Queries,
        which: torch.Tensor,
        lengths: torch.Tensor,
        recent: int,
        heads: int,
    ) -> Picked:
        """What the sequences `which` read, of what they need not read anyway."""
        options = self.options
        rows = (which[:, None] * heads + torch.arange(heads, device=which.device)).flatten()
        weights = layout.logits(queries.rows(rows), rows).softmax(-1)
        votes = weights.sum(1).view(len(which), heads, -1).sum(1)
        fixed = options.sinks + recent
        counts = (options.counts(lengths) - fixed).clamp(min=0)
        votes = votes.masked_fill(~between(lengths, votes.shape[1], options.sinks, recent), float("-inf"))
        return best(votes, counts, max(0, options.most(layout.longest) - fixed))


def _updated(vote: _Vote, which: torch.Tensor, fresh: _Vote) -> _Vote:
    """`vote` with that of the sequences `which` replaced."""
    most = max(vote.picked.index.shape[1], fresh.picked.index.shape[1])

    def wide(index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(index, (0, most - index.shape[1]))

    queries, counts = vote.queries.clone(), vote.picked.counts.clone()
    index = wide(vote.picked.index).clone()
    queries[which], counts[which], index[which] = fresh.queries, fresh.picked.counts, wide(fresh.picked.index)
    return _Vote(queries, Picked(index, counts))
