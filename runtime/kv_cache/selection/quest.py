"""Quest: pages whose keys could score highest, by the least and largest of each channel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch

from runtime.config.settings import Natural
from runtime.kv_cache.layer_state import LayerState
from runtime.kv_cache.pages import PAGE, Pages, PageTensor
from runtime.kv_cache.region import Chosen, Queries, Region
from runtime.kv_cache.selection.base import Budget, Selection
from runtime.kv_cache.selection.layout import SLICE_BYTES, Layout, best, split


@dataclass(frozen=True)
class Quest(Budget):
    """A head reads the pages that its queries could want most (Quest, arXiv 2406.10774).

    No key of a page has a higher product with a query than the sum over channels of the larger of q * least and q * largest.

    Attributes:
        skip_layers: first layers, which read everything.
        recent: newest tokens that are always read, with the pages they lie in; the first page is read too, and pages not yet full.
    """

    name: ClassVar[str] = "quest"
    skip_layers: Natural = 2
    recent: Natural = 32

    def always(self) -> int:
        return PAGE + super().always()

    def begin(self, layers: int) -> QuestSelection:
        return QuestSelection(self, layers)


def page_bound(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """What products of queries `[rows, m, size]` with keys between `low` and `high`, `[rows, pages, size]`, cannot exceed.

    Returns:
        float32 `[rows, m, pages]`.
    """
    exact = query.float()
    return exact.relu() @ high.float().transpose(1, 2) - (-exact).relu() @ low.float().transpose(1, 2)


class QuestSelection(Selection[Quest]):
    """Bounds of one cache's pages, and what steps read by them."""

    def __init__(self, options: Quest, layers: int) -> None:
        super().__init__(options, layers)
        self._bounds: list[WeakKeyDictionary[Region, _Bounds]] = [WeakKeyDictionary() for _ in range(layers)]

    def nbytes(self, index: int) -> int:
        return sum(bounds.nbytes for bounds in self._bounds[index].values())

    def _choose(self, layer: LayerState, queries: Queries, layout: Layout) -> list[Chosen | None]:
        options, regions = self.options, layout.regions
        bounds = self._complete(layer, layout)
        recent = max(options.recent, queries.count)
        # A cap leaves pages in their order, and only makes many of the best equal, unless something is added to what it gives.
        capped = any(region.has_bias for region in regions)
        parts = []
        for start, region in zip(layout.starts, regions, strict=True):
            places = PAGE * torch.arange(-(-region.longest // PAGE), device=layout.lengths.device)
            held = (region.lengths[:, None] - places).clamp(0, PAGE)
            score, known = self._scores(bounds, queries, region, capped)
            begin = start[:, None] + places
            needed = (begin == 0) | (begin + held > (layout.lengths - recent)[:, None]) | ~known
            parts.append((score, held, needed & (held > 0)))
        score, held, needed = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        score = score.masked_fill(held == 0, float("-inf")).masked_fill(needed, float("inf"))
        left = (options.counts(layout.lengths) - (held * needed).sum(1)).clamp(min=0)
        counts = torch.minimum(needed.sum(1) + left // PAGE, (held > 0).sum(1))
        picked = best(score, counts, self._most(layout, recent))
        pages = [part.shape[1] for part, *_ in parts]
        spans = [(end - count, end, count) for end, count in zip(accumulate(pages), pages, strict=True)]
        return split(replace(picked, unit=PAGE), spans)

    def _most(self, layout: Layout, recent: int) -> int:
        """No row reads more pages, counted without asking the device."""
        regions = len(layout.regions)
        # Each region ends in one page that is not full at most; full ones take their share of the budget.
        within = self.options.most(layout.longest) // PAGE + regions
        # What is read whatever the budget says: the first page, those not full, those that the newest tokens are spread over.
        return max(within, 1 + regions + recent // PAGE + 2 * regions)

    def _complete(self, layer: LayerState, layout: Layout) -> WeakKeyDictionary[Region, _Bounds]:
        """Bounds of the layer's regions, those of new pages added."""
        bounds, regions, watch = self._bounds[layer.index], layout.regions, self._watches[layer.index]
        watch.void(layer, layout)
        if watch.moved:
            bounds.clear()
        if watch.taken and regions[-1] in bounds:
            bounds[regions[-1]].take_back(watch.taken)
        # A tail in front of which there are storages is short, and its pages are others whenever some tokens leave it. (Into a prefix
        # alone tokens go before a page of them is full.)
        stay = regions[:-1] if layer.storage.tiers or layer.storage.clusters else regions
        for region in stay:
            if region not in bounds:
                bounds[region] = _Bounds(region)
            bounds[region].update(region)
        return bounds

    def _scores(
        self, bounds: WeakKeyDictionary[Region, _Bounds], queries: Queries, region: Region, capped: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of a region's pages, float32 `[rows, pages]`, and where they are right."""
        columns = torch.arange(-(-region.longest // PAGE), device=region.device)
        kept = bounds.get(region)
        if kept is None:
            ids = region.table[:, : len(columns)].clamp(min=0)
            low, high = region.page_keys(ids.flatten()).view(*ids.shape, PAGE, -1).aminmax(dim=2)
            known, bias = region.lengths // PAGE, None
        else:
            low, high, bias = kept.first(len(columns))
            known = kept.lengths
        score = page_bound(queries.states, low, high)
        score = queries.scores(score) if capped else score * queries.scale
        if bias is not None:
            score = score + bias.unsqueeze(1)
        return queries.highest(score), columns < known[:, None]


class _Bounds(Pages):
    """Least and largest keys of a region's full pages, as "tokens" of pages of their own.

    Args:
        region: whose.
    """

    def __init__(self, region: Region) -> None:
        size = PageTensor(region.sizes[0], region.dtype)
        parts = {"low": size, "high": size} | ({"bias": PageTensor(1, torch.float32)} if region.has_bias else {})
        super().__init__(region.rows, parts, region.device)
        self._seen: torch.Tensor | None = None  # the region's lengths when it was looked at

    def update(self, region: Region) -> None:
        """Add pages that have become full."""
        if region.lengths is self._seen:
            return
        self._seen = region.lengths
        counts = region.lengths // PAGE - self.lengths
        if not int(counts.max()):
            return
        columns, first = torch.arange(region.table.shape[1], device=counts.device), self.lengths[:, None]
        ids = region.table[(columns >= first) & (columns < first + counts[:, None])]
        slices = ids.split(max(1, SLICE_BYTES // (4 * PAGE * region.sizes[0])))
        bounds = [region.page_keys(part).aminmax(dim=1) for part in slices]
        new = {"low": torch.cat([part.min for part in bounds]), "high": torch.cat([part.max for part in bounds])}
        if region.has_bias:
            new["bias"] = region.copy_of(region.pools["bias"], ids).amax(1)
        self.append_flat(new, counts)

    def take_back(self, count: int) -> None:
        """Forget pages that the newest `count` tokens of when it was last looked at were in."""
        assert self._seen is not None
        self.crop((self._seen - count).clamp(min=0) // PAGE)

    def first(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Copies of the first `count` pages' bounds, `[rows, count, size]`, and biases `[rows, count]`; whatever where none is known."""
        table = self.table.clamp(min=0)

        def part(name: str) -> torch.Tensor:
            found = self.pools[name][table].flatten(1, 2)[:, :count]
            return torch.nn.functional.pad(found, (0, 0, 0, count - found.shape[1]))

        bias = part("bias")[..., 0] if "bias" in self.parts else None
        return part("low"), part("high"), bias
