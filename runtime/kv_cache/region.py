"""Part of a layer's cache whose keys and values are stored in one way, and what attention over it is."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

import torch

from runtime.kv_cache.pages import Allocate, Pages, PageTensor
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.plain import Plain


@dataclass(frozen=True)
class Queries:
    """The queries of one layer and step, and how attention makes scores of them.

    Attributes:
        states: `[batch * kv_heads, groups * count, size]`, query heads of a key head together.
        scale: of the scores.
        softcap: 0: none; else scores become softcap * tanh(scores / softcap), before any bias (Gemma 2).
        count: new tokens of this step, whose keys are in the tail already.
        counted: bool `[batch * kv_heads, groups * count]`, False where a query is padding (on the left of a row's new tokens); None:
            none is.
    """

    states: torch.Tensor
    scale: float
    softcap: float = 0.0
    count: int = 1
    counted: torch.Tensor | None = None

    @property
    def later(self) -> torch.Tensor | int:
        """How many tokens of this step came after its first, int64 `[batch * kv_heads]` where rows differ."""
        if self.counted is None:
            return self.count - 1
        return (self.counted[:, : self.count].sum(1) - 1).clamp(min=0)

    def first(self) -> Queries:
        """Those of the step's first token alone: the only one that is no draft, and stays whatever is taken back of the step.

        (Of a row that is all padding, those of the last.)
        """
        if self.count == 1:
            return self
        states = self.states.unflatten(1, (-1, self.count))
        if self.counted is None:
            return replace(self, states=states[:, :, 0], count=1)
        place = (self.count - 1 - self.later)[:, None, None, None].expand(-1, states.shape[1], 1, states.shape[3])  # type: ignore[index]
        return replace(self, states=states.gather(2, place)[:, :, 0], count=1, counted=None)

    def votes(self, logits: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of all queries of a row to each of its first `lengths` tokens, summed, float32 `[rows, n]`.

        Args:
            logits: `[rows, groups * count, n]`.
            lengths: int64 `[rows]`; None: logits are minus infinity where there is no token.
        """
        if lengths is not None:
            there = torch.arange(logits.shape[2], device=lengths.device) < lengths[:, None]
            logits = logits.masked_fill(~there.unsqueeze(1), float("-inf"))
        weights = logits.softmax(-1)
        if self.counted is not None:
            weights = weights.masked_fill(~self.counted.unsqueeze(-1), 0.0)
        return weights.sum(1)

    def highest(self, scores: torch.Tensor) -> torch.Tensor:
        """The largest that any query of a row gives, `[rows, n]`; `scores` are `[rows, groups * count, n]`."""
        if self.counted is not None:
            scores = scores.masked_fill(~self.counted.unsqueeze(-1), float("-inf"))
        return scores.amax(1)

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """What attention makes of products of queries and keys, any shape; biases come after."""
        scores = products * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def rows(self, which: torch.Tensor) -> Queries:
        """Those of the rows `which` (int64) alone."""
        return replace(self, states=self.states[which], counted=None if self.counted is None else self.counted[which])


@dataclass(frozen=True)
class Chosen:
    """What a step reads of each row, in a region or in the order of arrival.

    Attributes:
        index: int64 `[rows, most]`, ascending: tokens (`unit` 1), or pages, in a region columns of a row's table (`unit` PAGE).
        counts: int64 `[rows]`, how many of them count.
        unit: PAGE or 1.
    """

    index: torch.Tensor
    counts: torch.Tensor
    unit: int = 1

    @property
    def counted(self) -> torch.Tensor:
        """bool `[rows, most]`: which of `index` count."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.counts[:, None]

    @property
    def nbytes(self) -> int:
        """Memory as allocated, bytes."""
        return self.index.untyped_storage().nbytes() + self.counts.untyped_storage().nbytes()

    def before(self, ends: torch.Tensor) -> Chosen:
        """Those before the positions `ends`, int64 `[rows]`."""
        return replace(self, counts=(self.counted & (self.index < ends[:, None])).sum(1))

    def per_head(self, heads: int) -> Chosen:
        """Of sequences: the same for each of their key heads."""
        return Chosen(self.index.repeat_interleave(heads, 0), self.counts.repeat_interleave(heads, 0), self.unit)


class Region(Pages):
    """Pages with keys and values of `rows` heads, of one storage.

    Args:
        rows: `batch * kv_heads`.
        sizes: channels of a key and of a value.
        dtype: the model's.
        device: where attention runs.
        keys: how keys are stored.
        values: how values are stored.
        bias: tokens have a number that is added to their attention logits, float32 (clusters: the log of how many they stand for).
        allocate: where the pools are.

    Attributes:
        codecs: of "keys" and "values".
        pools: "keys.codes", "keys.scale", ..., "values.codes", ..., and "bias" where there is one.
    """

    def __init__(
        self,
        rows: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        keys: Codec | None = None,
        values: Codec | None = None,
        bias: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        self.sizes, self.dtype, self.has_bias = sizes, dtype, bias
        self.codecs = {"keys": keys or Plain(), "values": values or Plain()}
        parts = {"bias": PageTensor(1, torch.float32)} if bias else {}
        for (side, codec), size in zip(self.codecs.items(), sizes, strict=True):
            parts |= {f"{side}.{name}": part for name, part in codec.parts(size, dtype).items()}
        super().__init__(rows, parts, device, allocate)

    def encoded(
        self, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Tensors to append, of whole pages `[pages, PAGE, size]`; plain floats may be `[rows, t, size]` or `[rows, size]` as well.

        Args:
            bias: float32 `[pages, PAGE]`, where the region has one.
        """
        found = {} if bias is None else {"bias": bias.unsqueeze(-1)}
        for side, states in (("keys", keys), ("values", values)):
            packed = self.codecs[side].encode(states)
            found |= {f"{side}.{name}": tensor for name, tensor in packed.parts.items()}
        return found

    # ---------------------------------------------------------------- reading
    def pools_of(self, side: str) -> dict[str, torch.Tensor]:
        """The pools of "keys" or "values", by their codec's names."""
        prefix = f"{side}."
        return {name.removeprefix(prefix): pool for name, pool in self.pools.items() if name.startswith(prefix)}

    def with_pools(self, pools: dict[str, torch.Tensor], table: torch.Tensor | None = None) -> Region:
        """The same tokens with other pools, for reading: copies of these somewhere else.

        Args:
            pools: of the same parts.
            table: int64 `[rows, most pages]`, where pages are in them; None: where they are in these.
        """
        region = copy(self)
        region.pools = pools
        if table is not None:
            region.table = table
        return region

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values `[rows, longest, size]` in the model's dtype, zeros past a row's length."""
        keys, values = (self.spread(self._decoded(side, self.in_use)) for side in self.codecs)
        return keys, values

    def bias(self) -> torch.Tensor | None:
        """float32 `[rows, longest]`, or None where tokens have none."""
        return self.dense("bias")[..., 0] if self.has_bias else None

    def page_keys(self, ids: torch.Tensor) -> torch.Tensor:
        """Keys of `[n]` pages of the pools, `[n, PAGE, size]` in the model's dtype; slots not in use have arbitrary values."""
        return self._decoded("keys", lambda pool: self.copy_of(pool, ids))

    def _decoded(self, side: str, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = {name: read(pool) for name, pool in self.pools_of(side).items()}
        return self.codecs[side].decode(parts, self.sizes[side == "values"], self.dtype)


def region_attention(
    queries: Queries, region: Region, visible: torch.Tensor | None = None, chosen: Chosen | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over one region, in plain torch: the reference that kernels are tested against.

    Args:
        queries: m of each row.
        region: what is attended to.
        visible: int64 `[rows, m]`: how many of a row's tokens, from the front, a query sees; None: all.
        chosen: what is read; None: all.

    Returns:
        float32 output `[rows, m, value size]` normalized over this region, zeros where a query sees nothing, and the logarithm
        of the sum of exponentials of its scores, float32 `[rows, m]`, minus infinity there. `merge` puts regions together.
    """
    keys, values = region.states()
    scores = queries.scores(queries.states.float() @ keys.float().transpose(1, 2))
    bias = region.bias()
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    seen = region.used().unsqueeze(1).expand_as(scores)
    if visible is not None:
        seen = seen & (torch.arange(keys.shape[1], device=keys.device) < visible.unsqueeze(-1))
    if chosen is not None:
        seen = seen & chosen_mask(chosen, keys.shape[1]).unsqueeze(1)
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ values.float(), scores.logsumexp(-1)


def chosen_mask(chosen: Chosen, longest: int) -> torch.Tensor:
    """bool `[rows, longest]`: tokens that are read."""
    columns = -(-longest // chosen.unit)
    mask = torch.zeros(len(chosen.index), columns + 1, dtype=torch.bool, device=chosen.index.device)
    mask.scatter_(1, chosen.index.masked_fill(~chosen.counted, columns), True)
    return mask[:, :columns].repeat_interleave(chosen.unit, 1)[:, :longest]


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention over several regions from attention over each: float32 `[rows, m, size]`, zeros where none is seen."""
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([part[1] for part in parts])
    weights = (lse - lse.amax(0).nan_to_num(neginf=0.0)).exp()
    weights = weights / weights.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    return sum(part[0] * weight.unsqueeze(-1) for part, weight in zip(parts, weights, strict=True))  # type: ignore[return-value]
