"""Layout of a layer's tokens at one step: their positions in order of arrival, in the layer's regions, and what a step reads of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Queries, Region

SLICE_BYTES = 32 << 20  # of keys that are decoded at a time
_BEHIND = 1 << 62  # sorts behind all positions
_Place = torch.Tensor | int


class Layout:
    """A layer's tokens at one step, each row's in the order of arrival: 0 is the oldest that the row has.

    Args:
        regions: in that order.

    Attributes:
        lengths: int64 `[rows]`.
        longest: on the host, at least the longest of them.
        starts: for each region int64 `[rows]`, the place of its first token.
    """

    def __init__(self, regions: list[Region]) -> None:
        self.regions = regions
        lengths = [region.lengths for region in regions]
        *self.starts, self.lengths = accumulate(lengths, initial=torch.zeros_like(lengths[0]))
        self.longest = sum(region.longest for region in regions)

    def logits(self, queries: Queries, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of all tokens, float32 `[rows, m, longest]` (cap and biases included), minus infinity where there is none.

        Keys are decoded in slices, so that only the scores are ever there as a whole.

        Args:
            queries: of these rows.
            rows: int64, which rows of the layer these are; None: all.
        """
        exact = queries.states.float()
        count, width, size = exact.shape
        # The last column takes what is no token.
        result = exact.new_full((count, width, self.longest + 1), float("-inf"))
        step = max(1, SLICE_BYTES // (4 * max(1, count) * PAGE * size))
        which = slice(None) if rows is None else rows
        for begin, region in zip(self.starts, self.regions, strict=True):
            start, table, lengths = (part[which] for part in (begin, region.table, region.lengths))
            bias = region.bias()
            for first in range(0, -(-region.longest // PAGE), step):
                ids = table[:, first : first + step]
                keys = region.page_keys(ids.clamp(min=0).flatten()).view(count, -1, size).float()
                scores = queries.scores(exact @ keys.transpose(1, 2))
                places = torch.arange(first * PAGE, first * PAGE + keys.shape[1], device=keys.device)
                if bias is not None:
                    scores = scores + bias[which][:, None, places.clamp(max=bias.shape[1] - 1)]
                columns = (start[:, None] + places).masked_fill(places >= lengths[:, None], self.longest)
                result.scatter_(2, columns.unsqueeze(1).expand_as(scores), scores)
        return result[..., : self.longest]

    def bias(self) -> torch.Tensor | None:
        """What is added to tokens' scores, float32 `[rows, longest]`; None: nothing."""
        if not any(region.has_bias for region in self.regions):
            return None
        result = torch.zeros(len(self.lengths), self.longest + 1, device=self.lengths.device)
        for start, region in zip(self.starts, self.regions, strict=True):
            bias = region.bias()
            if bias is not None:
                columns = start[:, None] + torch.arange(bias.shape[1], device=start.device)
                result.scatter_(1, columns.masked_fill(~region.used(), self.longest), bias)
        return result[:, : self.longest]

    def since(self, known: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys of the tokens of each row from place `known[row]` on, in slices of pages.

        Yields:
            Keys `[n, size]`, the row of each `[n]`, and its position `[n]`.
        """
        for start, region in zip(self.starts, self.regions, strict=True):
            table, lengths = region.table, region.lengths
            columns = PAGE * torch.arange(table.shape[1], device=table.device)
            wanted = (columns < lengths[:, None]) & (start[:, None] + columns + PAGE > known[:, None])
            rows, pages = wanted.nonzero(as_tuple=True)
            step = max(1, SLICE_BYTES // (4 * PAGE * region.sizes[0]))
            for part in range(0, len(rows), step):
                row, page = rows[part : part + step], pages[part : part + step]
                places = (start[row] + PAGE * page)[:, None] + torch.arange(PAGE, device=row.device)
                new = (places >= known[row, None]) & (places < (start + lengths)[row, None])
                yield region.page_keys(table[row, page])[new], row[:, None].expand_as(new)[new], places[new]

    def chosen(self, picked: Chosen) -> list[Chosen | None]:
        """The tokens of each region that were picked."""
        spans = []
        for start, region in zip(self.starts, self.regions, strict=True):
            spans.append((start[:, None], (start + region.lengths)[:, None], region.longest))
        return split(picked, spans)


def split(picked: Chosen, spans: Sequence[tuple[_Place, _Place, int]]) -> list[Chosen | None]:
    """What was picked of all regions together, region by region.

    Args:
        picked: in the order of arrival.
        spans: for each region the number of its first place and the one behind its last, int64 `[rows, 1]` where rows differ, and the
            most a row has.
    """
    index, counted = picked.index, picked.counted
    columns = torch.arange(index.shape[1], device=index.device)
    result: list[Chosen | None] = []
    for first, behind, longest in spans:
        before = counted & (index < first)
        inside = counted & ~before & (index < behind)
        own = columns[: min(len(columns), longest)] + before.sum(1, keepdim=True)
        own = index.gather(1, own.clamp(max=len(columns) - 1)) - first
        result.append(Chosen(own.clamp(0, max(0, longest - 1)), inside.sum(1), picked.unit))
    return result


# ---------------------------------------------------------------- picking
def best(scores: torch.Tensor, counts: torch.Tensor, most: int) -> Chosen:
    """The `counts[row]` best positions of each row.

    Args:
        scores: `[rows, n]`, minus infinity where nothing may be picked.
        counts: int64 `[rows]`, no more than may be picked.
        most: on the host, at least the largest count.
    """
    most = min(most, scores.shape[1])
    top = scores.topk(most).indices
    unwanted = torch.arange(most, device=top.device) >= counts[:, None]
    return Chosen(top.masked_fill(unwanted, _BEHIND).sort(-1).values, counts)


def between(lengths: torch.Tensor, longest: int, sinks: int, recent: int) -> torch.Tensor:
    """bool `[rows, longest]`: tokens that are neither among the first `sinks` nor the newest `recent`."""
    columns = torch.arange(longest, device=lengths.device)
    return (columns >= sinks) & (columns < (lengths - recent)[:, None])


def with_ends(picked: Chosen, lengths: torch.Tensor, sinks: int, recent: int) -> Chosen:
    """What was picked, the first `sinks` and the newest `recent` tokens; none of them twice."""
    rows, device = len(lengths), lengths.device
    newest = (lengths - recent).clamp(min=sinks)[:, None]
    first = torch.arange(sinks, device=device).expand(rows, -1)
    last = newest + torch.arange(recent, device=device)
    index = torch.cat([first, picked.index, last], 1)
    middle = picked.counted & (picked.index >= sinks) & (picked.index < newest)
    wanted = torch.cat([first < lengths[:, None], middle, last < lengths[:, None]], 1)
    return Chosen(index.masked_fill(~wanted, _BEHIND).sort(-1).values, wanted.sum(1))


# ---------------------------------------------------------------- what stays where it is
class PositionWatch:
    """Watch over positions in a layer's order of arrival: whether they are still those of the same tokens.

    Attributes:
        moved: whether tokens left their positions between the last two times that it was asked.
        taken: newest tokens of every row that were taken back between these.
        stays: tokens before these places are where they were the time before, int64 `[rows]`; None: all that there were. Only where
            nothing was void.
    """

    def __init__(self) -> None:
        self.stays: torch.Tensor | None = None
        self.moved, self.taken = True, 0
        self._last: tuple[int, int, list[torch.Tensor], torch.Tensor] | None = None

    def void(self, layer: LayerState, layout: Layout) -> bool:
        """Whether that happened to any but the newest tokens since it was last asked; True the first time."""
        older = [region.lengths for region in layout.regions[:-1]]
        last, self._last = self._last, (layer.changes, layer.taken_back, older, layout.lengths)
        if last is None:
            return True
        changes, taken_back, before, lengths = last
        self.moved, self.taken = layer.changes != changes, layer.taken_back - taken_back
        self.stays = (lengths - self.taken).clamp(min=0) if self.taken else None
        # Lengths are a new tensor whenever a region is written to, so that no number need be fetched from the device.
        stored = len(older) != len(before) or any(a is not b for a, b in zip(older, before, strict=True))
        return self.moved or (stored and layer.storage.is_final)
