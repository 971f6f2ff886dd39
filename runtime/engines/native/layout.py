"""Layout of a sequence whose layers and heads keep different numbers of tokens: pages that all share, and blocks of each head's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.kernels.cpu.attention import PAGE, Ragged


class Arena(NamedTuple):
    """Layers whose pages lie one layer after another in memory, so that a block of one can hold a page of another's head.

    Attributes:
        layers: their numbers. places: of each, where it is among all layers there.
    """

    layers: list[int]
    places: list[int]


@dataclass(frozen=True)
class Layout:
    """Where tokens lie, as `Ragged` of kv_store.h says it.

    The newest tokens of all heads end in the same slot, so that later ones have one slot in all layers. Before them each head has as
    many whole pages as it needs, which are packed into as few pages of the sequence as they fill.

    Attributes:
        lead: pages at the beginning that are those of all heads. first: int64 `[layers, kv_heads]`, tokens in them, a head's oldest.
        packed: pages that follow, whose blocks heads share out. counts: int64 `[layers, kv_heads]`, of each head.
        begin: int64 `[layers, kv_heads]`, position of the first token behind the lead, as the head counts.
        slots: taken in the pages of the sequence.
    """

    lead: int
    first: torch.Tensor
    packed: int
    counts: torch.Tensor
    begin: torch.Tensor
    slots: int

    @classmethod
    def of(
        cls, held: torch.Tensor, lead: int, recent: int, arenas: Sequence[Arena], windows: Sequence[int] = ()
    ) -> Layout:
        """The one of fewest pages for so many tokens, int64 `[layers, kv_heads]`.

        Args:
            lead: pages of the oldest tokens that stay where all heads have them.
            recent: newest tokens that cannot be packed.
            windows: layers whose tokens are one after another.
        """
        first = torch.full_like(held, lead * PAGE).clamp(max=held.min())
        first[list(windows)] = 0
        rest = held - first
        # The newest tokens of all heads that are not packed: as many as some head has, or must have.
        tails = rest.clamp(min=min(recent, int(rest.max()))).unique()
        counts = -(-(rest - tails.view(-1, 1, 1)).clamp(min=0) // PAGE)
        packed = torch.stack([-(-counts[:, a.layers].sum((1, 2)) // (len(a.layers) * held.shape[1])) for a in arenas])
        most = packed.amax(0)
        best = int(((most - (-tails // PAGE)) * len(tails) + torch.arange(len(tails) - 1, -1, -1)).argmin())
        tail, own = int(tails[best]), counts[best]
        begin = (lead + own) * PAGE + tail - rest
        return cls(lead, first, int(most[best]), own, begin, (lead + int(most[best])) * PAGE + tail)

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where tokens are, int64 `[layers, kv_heads, n]`, as heads count; they are numbered in the order of arrival."""
        first, begin = self.first.unsqueeze(-1), self.begin.unsqueeze(-1)
        return torch.where(tokens < first, tokens, tokens - first + begin)

    @property
    def farthest(self) -> int:
        """By how much the position of a token is more than its slot in the pages of the sequence, at most."""
        return (int(self.counts.max()) - self.packed) * PAGE

    def structure(self, pages: Sequence[int], count: int, arenas: Sequence[Arena]) -> RaggedPages:
        """In C, in these pages of a sequence, of a pool of `count`."""
        layers, heads = self.counts.shape
        blocks = torch.zeros(layers, heads, max(1, int(self.counts.max())), dtype=torch.int64)
        packed = torch.tensor(pages[self.lead : self.lead + self.packed], dtype=torch.int64)
        number = torch.arange(blocks.shape[-1])
        for arena in arenas:
            places, wanted = torch.tensor(arena.places), self.counts[arena.layers]
            # A head's oldest pages are in blocks of other heads, where it has more than are packed.
            others = (wanted - self.packed).clamp(min=0).unsqueeze(-1)
            own = (number - others).clamp(0, max(0, self.packed - 1))
            own = (packed[own] if self.packed else own) * heads + torch.arange(heads).unsqueeze(-1)
            spare = (torch.arange(self.packed) >= wanted.unsqueeze(-1)).nonzero(as_tuple=True)
            layer, head, place = (number < others).nonzero(as_tuple=True)
            from_layer, from_head, page = (each[: len(layer)] for each in spare)
            own[layer, head, place] = ((places[from_layer] - places[layer]) * count + packed[page]) * heads + from_head
            blocks[arena.layers] = own
        return RaggedPages(self, blocks)


class RaggedPages:
    """A layout in C.

    Attributes:
        ragged: of kv_store.h, with the tensors that it points to.
    """

    def __init__(self, layout: Layout, blocks: torch.Tensor) -> None:
        """`blocks`: int64 `[layers, kv_heads, most pages of a head's own]`."""
        self.layout = layout
        self._tensors = blocks.to(torch.int32), layout.counts.to(torch.int32), layout.first, layout.begin.contiguous()
        addresses = (each.data_ptr() for each in self._tensors)
        self.ragged = Ragged(*addresses, blocks.shape[-1], layout.lead, layout.packed)
