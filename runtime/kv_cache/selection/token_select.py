"""TokenSelect: all heads vote which tokens to read, and a vote holds while queries stay alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Natural, NonNegative
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.region import Chosen, Queries
from runtime.kv_cache.selection.base import Budget, Selection
from runtime.kv_cache.selection.layout import Layout, with_ends


@dataclass(frozen=True)
class TokenSelect(Budget):
    """Heads of a layer read the tokens that get most attention, summed over all of them (TokenSelect, arXiv 2411.02886).

    Every head's weights add up to 1, so that none outvotes the others by large scores. A sequence keeps its tokens until a query is
    less like the one they were chosen for than `similarity`; sinks and the newest tokens, which it reads too, move on. In a step of
    several tokens all of them vote if one is less like it, and what is kept is what the first would have chosen: the others may be drafts.

    Attributes:
        similarity: cosine, of all heads' queries together, from which on tokens are chosen anew.
        sinks: first tokens, which are always read.
        recent: newest tokens, likewise.
        skip_layers: first layers, which read everything.
    """

    name: ClassVar[str] = "token-select"
    needs_aligned: ClassVar[bool] = True
    similarity: NonNegative = 0.9
    sinks: Natural = 4
    recent: Natural = 32
    skip_layers: Natural = 2

    def begin(self, layers: int) -> TokenSelectSelection:
        return TokenSelectSelection(self, layers)


@dataclass(frozen=True)
class _Vote:
    """What one layer's sequences read: the queries it was chosen for `[batch, heads * size]`, and the tokens, `[batch, ...]`."""

    queries: torch.Tensor
    picked: Chosen

    @property
    def nbytes(self) -> int:
        return self.queries.untyped_storage().nbytes() + self.picked.nbytes

    def before(self, ends: torch.Tensor) -> _Vote:
        return _Vote(self.queries, self.picked.before(ends.view(len(self.queries), -1)[:, 0]))


class TokenSelectSelection(Selection[TokenSelect]):
    """Tokens that the sequences of one cache voted for, and what steps read by them; votes read keys that `reads` does not count.

    Attributes:
        votes: for each layer how often sequences chose anew.
    """

    def __init__(self, options: TokenSelect, layers: int) -> None:
        super().__init__(options, layers)
        self.votes = [0] * layers

    def _choose(self, layer: LayerState, queries: Queries, layout: Layout) -> list[Chosen | None]:
        options = self.options
        batch, heads = layer.shape
        vote: _Vote | None = self._recall(layer, layout)
        lengths = self._sequences(layer, layout)
        recent = max(options.recent, queries.count)
        first = queries.first()
        own = first.states.reshape(batch, -1)

        def elect(some: Queries, which: torch.Tensor, ends: torch.Tensor) -> Chosen:
            """What the sequences `which` read of their first `ends` tokens, but for those that they need not choose."""
            rows = (which[:, None] * heads + torch.arange(heads, device=which.device)).flatten()
            voters = some.rows(rows)
            votes = voters.votes(layout.logits(voters, rows), ends.repeat_interleave(heads))
            return options.pick(votes.view(len(which), heads, -1).sum(1), ends, layout.longest, options.sinks, recent)

        unlike, changed = self._unlike(vote, queries, own)
        picked = before = None if vote is None else vote.picked
        again = unlike.nonzero().flatten()
        if len(again):
            self.votes[layer.index] += len(again)
            picked = stays = _updated(before, again, elect(queries, again, lengths[again]))
            which = changed.nonzero().flatten()
            if len(which):  # later steps read what the first token of this one chose
                if queries.count > 1:
                    later = queries.later
                    ends = lengths - (later if isinstance(later, int) else later.view(-1, heads)[:, 0])
                    stays = _updated(before, which, elect(first, which, ends[which]))
                voted = own.clone() if vote is None else vote.queries.clone()
                voted[which] = own[which]
                self._known[layer.index] = _Vote(voted, stays)
        assert picked is not None
        return layout.chosen(with_ends(picked, lengths, options.sinks, recent).per_head(heads))

    def _unlike(self, vote: _Vote | None, queries: Queries, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bool `[batch]` each: sequences with a query unlike the one that voted, and those whose step's first query, `own`, is."""
        batch = len(own)
        if vote is None:
            every = torch.ones(batch, dtype=torch.bool, device=own.device)
            return every, every

        def differs(states: torch.Tensor) -> torch.Tensor:
            alike = torch.cosine_similarity(states.float(), vote.queries.float().unsqueeze(1), dim=-1)
            return ~(alike >= self.options.similarity)

        first = differs(own.unsqueeze(1))[:, 0]
        if queries.count == 1:
            return first, first
        shape = batch, -1, queries.count, queries.states.shape[2]
        tokens = differs(queries.states.reshape(shape).transpose(1, 2).flatten(2))
        if queries.counted is not None:
            tokens = tokens & queries.counted.view(batch, -1, queries.count)[:, 0]
        return tokens.any(1), first


def _updated(picked: Chosen | None, which: torch.Tensor, fresh: Chosen) -> Chosen:
    """`picked` with what is fresh for the sequences `which` (int64); all of them where nothing was picked before."""
    if picked is None or len(which) == len(picked.counts):
        return fresh
    most = max(picked.index.shape[1], fresh.index.shape[1])

    def wide(index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(index, (0, most - index.shape[1]))

    counts, index = picked.counts.clone(), wide(picked.index).clone()
    counts[which], index[which] = fresh.counts, wide(fresh.index)
    return Chosen(index, counts)
