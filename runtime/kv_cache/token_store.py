"""Token store of one layer: its prefix, older tokens in one or several tiers, and the newest as floats."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.kv_cache.pages import PAGE, Allocate
from runtime.kv_cache.region import Region
from runtime.kv_cache.storage.plan import StoragePlan, Tier

#: Importance of the tail's tokens, `[rows, longest]`, asked for when several storages must be told apart.
Saliency = Callable[[], torch.Tensor]


class TokenStore:
    """Tokens of `rows` heads. In order of arrival they lie in the prefix, the tiers, the tail; among several tiers order is lost.

    Args:
        rows: `batch * kv_heads`.
        sizes: channels of a key and of a value.
        dtype: the model's.
        device: where attention runs.
        plan: how older tokens are stored.
        allocate: where tiers lie.

    Attributes:
        every: regions in order of arrival, empty ones too; the tail, which new tokens come to, is always the last.
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
        self.every = [*([] if self.prefix is None else [self.prefix]), *self.tiers, self.tail]

    # ---------------------------------------------------------------- size
    @property
    def regions(self) -> list[Region]:
        """Those with any tokens, and the tail."""
        return [region for region in self.every if region.longest or region is self.tail]

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
        pools = [pool for tier in self.tiers for pool in tier.pools.values()]
        return sum(pool.untyped_storage().nbytes() for pool in pools)

    # ---------------------------------------------------------------- reading
    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Copies of all tokens, each row's at the front.

        Returns:
            Keys and values `[rows, longest, size]`; bool `[rows, longest]`: in use; the biases float32 `[rows, longest]` or None.
        """
        regions = self.regions
        if len(regions) == 1:
            return *self.tail.states(), self.tail.used(), None
        keys, values = (torch.cat(states, 1) for states in zip(*(region.states() for region in regions), strict=True))
        uses = [region.used() for region in regions]
        used, bias = torch.cat(uses, 1), None
        if any(region.has_bias for region in regions):
            biases = [region.bias() for region in regions]
            bias = torch.cat([own.float() * 0 if b is None else b for b, own in zip(biases, uses, strict=True)], 1)
        # Gaps behind a row's tokens of one region close up.
        order = (~used).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(used.sum(1).max())]
        keys, values = (states.take_along_dim(order.unsqueeze(-1), 1) for states in (keys, values))
        return keys, values, used.gather(1, order), None if bias is None else bias.gather(1, order)

    # ---------------------------------------------------------------- writing
    def keep(self, places: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the tokens `places[row, :counts[row]]` of each row, counted in the order of `states`, ascending.

        Older tokens that stay are decoded, and stored anew by the next `settle`.
        """
        if len(self.regions) == 1:
            self.tail.keep(places, counts)
            return
        keys, values = (states.take_along_dim(places.unsqueeze(-1), 1) for states in self.states()[:2])
        for region in self.every:
            region.crop(torch.zeros_like(counts))
        self.tail.append(self.tail.encoded(keys, values), counts)

    def settle(self, saliency: Saliency) -> bool:
        """Move what is no longer recent out of the tail, whole chunks at a time; returns whether anything moved."""
        plan = self.plan
        full = bool(self.tiers) and self.tail.longest >= plan.recent + plan.chunk
        if not full and (self.prefix is None or bool((self.prefix.counts >= plan.prefix).all())):
            return False
        lengths = self.tail.lengths
        first = 0 * lengths if self.prefix is None else torch.minimum(plan.prefix - self.prefix.lengths, lengths)
        older = ((lengths - first - plan.recent).clamp(min=0) // plan.chunk * plan.chunk) if self.tiers else 0 * lengths
        if not int((first + older).max()):
            return False
        scores = saliency() if len(self.tiers) > 1 and int(older.max()) else None
        keys, values = self.tail.states()
        if self.prefix is not None:
            most = int(first.max())
            self.prefix.append(self.prefix.encoded(keys[:, :most], values[:, :most]), first)
        columns = torch.arange(keys.shape[1], device=self.device)
        moving = (columns >= first[:, None]) & (columns < (first + older)[:, None])
        if int(older.max()):
            for tier, where in zip(self.tiers, self._split(moving, scores), strict=True):
                self._store(tier, keys[where], values[where], where.sum(1))
        left = lengths - first - older
        places = columns[: max(1, int(left.max()))] + (first + older)[:, None]
        self.tail.keep(places.clamp(max=keys.shape[1] - 1), left)
        return True

    def select_rows(self, rows: torch.Tensor) -> None:
        """Only these rows, in that order; a row may come several times."""
        for region in self.every:
            region.select_rows(rows)

    # ---------------------------------------------------------------- settling
    def _split(self, moving: torch.Tensor, scores: torch.Tensor | None) -> list[torch.Tensor]:
        """For each tier bool `[rows, longest]`: what goes there, whole pages of each row."""
        if scores is None:
            return [moving]
        result = []
        left = moving
        pages = moving.sum(1) // PAGE
        total = pages + sum(tier.lengths for tier in self.tiers) // PAGE
        for tier, plan in zip(self.tiers[:-1], self.plan.tiers[:-1], strict=True):
            # Counted over all that the row has ever moved, so that shares come out right whatever a chunk is.
            wanted = ((total * plan.share).round().long() - tier.lengths // PAGE).clamp(min=0)
            wanted = torch.minimum(wanted, left.sum(1) // PAGE) * PAGE
            rank = scores.masked_fill(~left, float("-inf")).argsort(dim=-1, descending=True, stable=True).argsort(-1)
            best = (rank < wanted[:, None]) & left
            result.append(best)
            left = left & ~best
        return [*result, left]

    def _store(self, tier: Region, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> None:
        """Tokens `[n, size]`, `counts[row]` of each row, in a tier, similar ones merged where the plan says so."""
        clusters, bias = self.plan.clusters, None
        if clusters is not None:
            chunks = (states.unflatten(0, (-1, clusters.chunk)) for states in (keys, values))
            keys, values, merged = (states.flatten(0, 1) for states in clusters(*chunks))
            counts, bias = counts // clusters.chunk * clusters.kept, merged.log().view(-1, PAGE)
        keys, values = (states.unflatten(0, (-1, PAGE)) for states in (keys, values))
        tier.append_pages(tier.encoded(keys, values, bias), counts // PAGE)
