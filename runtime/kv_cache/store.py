"""Store of one layer: its prefix, older tokens in one or several tiers, and the newest as floats."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.kv_cache.pages import PAGE, Allocate
from runtime.kv_cache.region import Region
from runtime.kv_cache.storage.plan import StoragePlan, Tier

#: Importance of the tail's tokens, `[rows, longest]`, asked for when several storages must be told apart.
Saliency = Callable[[], torch.Tensor]


class Store:
    """Tokens of `rows` heads. In order of arrival they lie in the prefix, the tiers, the tail; among several tiers order is lost.

    Args:
        rows: `batch * kv_heads`.
        sizes: channels of a key and of a value.
        dtype: the model's.
        device: where attention runs.
        plan: how older tokens are stored.
        allocate: where tiers lie.
    """

    def __init__(
        self,
        rows: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        plan: StoragePlan,
        allocate: Allocate | None = None,
    ) -> None:
        self.plan, self.device = plan, device
        shape = rows, sizes, plan.floats or dtype, device
        self.tail = Region(*shape)
        self.prefix = Region(*shape) if plan.prefix else None
        biased = plan.clusters is not None
        tiers = plan.tiers or ((Tier(),) if biased else ())
        self.tiers = [Region(*shape, tier.keys, tier.values, biased, allocate) for tier in tiers]
        self._prefix_full = self.prefix is None
        self._shares = [tier.share for tier in tiers]

    # ---------------------------------------------------------------- size
    @property
    def regions(self) -> list[Region]:
        """Those with any tokens, in order of arrival; the tail, which new tokens come to, is always the last."""
        *older, tail = self.every
        return [*(region for region in older if region.longest), tail]

    @property
    def every(self) -> list[Region]:
        """As `regions`, empty ones too."""
        return [*([] if self.prefix is None else [self.prefix]), *self.tiers, self.tail]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 `[rows]`."""
        return torch.stack([region.lengths for region in self.regions]).sum(0)

    @property
    def nbytes(self) -> int:
        """Memory as allocated."""
        return sum(region.nbytes for region in self.every)

    @property
    def tier_bytes(self) -> int:
        """Of `nbytes`, the pools of older tokens: what is elsewhere where they are offloaded."""
        pools = [pool for tier in self.tiers for pool in tier.pages.pools.values()]
        return sum(pool.untyped_storage().nbytes() for pool in pools)

    # ---------------------------------------------------------------- reading
    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of keys and values `[rows, longest, size]`, and bool `[rows, longest]`: in use. Each row's tokens at the front."""
        keys, values, used, _ = self.everything()
        return keys, values, used

    def everything(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `states`, and the biases float32 `[rows, longest]` or None."""
        regions = self.regions
        if len(regions) == 1:
            return *self.tail.states(), self.tail.pages.used(), None
        states = [region.states() for region in regions]
        keys = torch.cat([k for k, _ in states], 1)
        values = torch.cat([v for _, v in states], 1)
        used = torch.cat([region.pages.used() for region in regions], 1)
        biases = [region.bias() for region in regions]
        bias = None
        if any(b is not None for b in biases):
            zeros = [torch.zeros_like(u, dtype=torch.float32) for u in (r.pages.used() for r in regions)]
            bias = torch.cat([z if b is None else b for b, z in zip(biases, zeros, strict=True)], 1)
        # Gaps behind a row's tokens of one region close up.
        order = (~used).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(used.sum(1).max())]
        wide = order.unsqueeze(-1)
        keys = keys.gather(1, wide.expand(-1, -1, keys.shape[-1]))
        values = values.gather(1, wide.expand(-1, -1, values.shape[-1]))
        return keys, values, used.gather(1, order), None if bias is None else bias.gather(1, order)

    # ---------------------------------------------------------------- writing
    def keep(self, places: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the tokens `places[row, :counts[row]]` of each row, counted in the order of `states`, ascending.

        Older tokens that stay are decoded, and stored anew by the next `settle`.
        """
        if len(self.regions) == 1:
            self.tail.pages.keep(places, counts)
            return
        keys, values, _ = self.states()
        wide = places.unsqueeze(-1)
        keys = keys.gather(1, wide.expand(-1, -1, keys.shape[-1]))
        values = values.gather(1, wide.expand(-1, -1, values.shape[-1]))
        for region in self.every:
            region.pages.crop(torch.zeros_like(counts))
        self._prefix_full = self.prefix is None
        self.tail.append(keys, values, counts)

    def settle(self, saliency: Saliency) -> bool:
        """Move what is no longer recent out of the tail, whole chunks at a time; returns whether anything moved."""
        plan = self.plan
        full = bool(self.tiers) and self.tail.longest >= plan.recent + plan.chunk
        if not full and not self._prefix_is_short():
            return False
        lengths = self.tail.lengths
        first = self._prefix_missing()
        older = ((lengths - first - plan.recent).clamp(min=0) // plan.chunk * plan.chunk) if self.tiers else 0 * lengths
        if not int((first + older).max()):
            return False
        scores = saliency() if len(self.tiers) > 1 and int(older.max()) else None
        keys, values = self.tail.states()
        if self.prefix is not None:
            self.prefix.append(keys[:, : int(first.max())], values[:, : int(first.max())], first)
        columns = torch.arange(keys.shape[1], device=self.device)
        moving = (columns >= first[:, None]) & (columns < (first + older)[:, None])
        if int(older.max()):
            if plan.clusters is not None:
                self._store_clusters(keys[moving], values[moving], older)
            else:
                for tier, where in zip(self.tiers, self._split(moving, scores), strict=True):
                    shape = (-1, PAGE)
                    pages = where.sum(1) // PAGE
                    tier.append_pages(
                        keys[where].view(*shape, keys.shape[-1]), values[where].view(*shape, values.shape[-1]), pages
                    )
        left = lengths - first - older
        places = columns[: max(1, int(left.max()))] + (first + older)[:, None]
        self.tail.pages.keep(places.clamp(max=keys.shape[1] - 1), left)
        return True

    def select_rows(self, rows: torch.Tensor) -> None:
        """Only these rows, in that order; a row may come several times."""
        for region in self.every:
            region.pages.select_rows(rows)

    # ---------------------------------------------------------------- settling
    def _prefix_missing(self) -> torch.Tensor:
        """int64 `[rows]`: tokens of the tail that belong to the prefix."""
        if self.prefix is None:
            return torch.zeros_like(self.tail.lengths)
        return torch.minimum(self.plan.prefix - self.prefix.lengths, self.tail.lengths)

    def _prefix_is_short(self) -> bool:
        if self._prefix_full or self.prefix is None:
            return False
        self._prefix_full = bool((self.prefix.lengths >= self.plan.prefix).all())
        return bool((self._prefix_missing() > 0).any())

    def _split(self, moving: torch.Tensor, scores: torch.Tensor | None) -> list[torch.Tensor]:
        """For each tier bool `[rows, longest]`: what goes there, whole pages of each row."""
        if scores is None:
            return [moving]
        result = []
        left = moving
        pages = moving.sum(1) // PAGE
        total = pages + sum(tier.lengths for tier in self.tiers) // PAGE
        for tier, share in zip(self.tiers[:-1], self._shares[:-1], strict=True):
            # Counted over all that the row has ever moved, so that shares come out right whatever a chunk is.
            wanted = ((total * share).round().long() - tier.lengths // PAGE).clamp(min=0)
            wanted = torch.minimum(wanted, left.sum(1) // PAGE) * PAGE
            rank = scores.masked_fill(~left, float("-inf")).argsort(dim=-1, descending=True, stable=True).argsort(-1)
            best = (rank < wanted[:, None]) & left
            result.append(best)
            left = left & ~best
        return [*result, left]

    def _store_clusters(self, keys: torch.Tensor, values: torch.Tensor, older: torch.Tensor) -> None:
        clusters = self.plan.clusters
        assert clusters is not None
        shape = (-1, clusters.chunk)
        merged = clusters(keys.view(*shape, keys.shape[-1]), values.view(*shape, values.shape[-1]))
        pages = older // clusters.chunk * (clusters.kept // PAGE)
        self.tiers[0].append_pages(
            merged.keys.view(-1, PAGE, keys.shape[-1]),
            merged.values.view(-1, PAGE, values.shape[-1]),
            pages,
            merged.counts.log().view(-1, PAGE),
        )
