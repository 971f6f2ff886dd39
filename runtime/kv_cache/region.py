"""Part of a layer's cache whose keys and values are stored in one way, and what attention over it is."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch

from runtime.kv_cache.pages import PAGE, Allocate, Pages, Part
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.plain import Plain

_KEYS, _VALUES = "keys.", "values."


@dataclass(frozen=True)
class Chosen:
    """What of a region a step reads.

    Attributes:
        index: int64 `[rows, most]`, ascending: columns of a row's table (`unit` PAGE) or its tokens (`unit` 1).
        counts: int64 `[rows]`, how many of them count.
        unit: PAGE or 1.
    """

    index: torch.Tensor
    counts: torch.Tensor
    unit: int


class Region:
    """Keys and values of `rows` heads in pages of one storage.

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
        pages: the pools "keys.codes", "keys.scale", ..., "values.codes", ..., and "bias" where there is one.
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
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.keys, self.values, self.has_bias = keys or Plain(), values or Plain(), bias
        parts = {_KEYS + name: part for name, part in self.keys.parts(sizes[0], dtype).items()}
        parts |= {_VALUES + name: part for name, part in self.values.parts(sizes[1], dtype).items()}
        if bias:
            parts["bias"] = Part(1, torch.float32)
        self.pages = Pages(rows, parts, device, allocate)

    # ---------------------------------------------------------------- size
    @property
    def lengths(self) -> torch.Tensor:
        """int64 `[rows]`: how many tokens there are."""
        return self.pages.lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.pages.longest

    @property
    def nbytes(self) -> int:
        """Memory as allocated."""
        return self.pages.nbytes

    # ---------------------------------------------------------------- writing
    def append(self, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> None:
        """The first `counts[row]` of `[rows, t, size]` each; regions of plain floats only."""
        self.pages.append({"keys.codes": keys, "values.codes": values}, counts)

    def append_one(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """One token for every row, `[rows, size]` each; regions of plain floats only."""
        self.pages.append_one({"keys.codes": keys, "values.codes": values})

    def append_pages(
        self, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """Whole pages `[pages, PAGE, size]` in the model's dtype, those of row 0 first; `counts[row]` pages each.

        Args:
            bias: float32 `[pages, PAGE]`; None: zeros, where the region has one.
        """
        parts = {_KEYS + name: tensor for name, tensor in self.keys.encode(keys).parts.items()}
        parts |= {_VALUES + name: tensor for name, tensor in self.values.encode(values).parts.items()}
        if self.has_bias:
            shape = (*keys.shape[:2], 1)
            parts["bias"] = torch.zeros(shape, device=self.device) if bias is None else bias.view(shape)
        self.pages.append_pages(parts, counts)

    # ---------------------------------------------------------------- reading
    def with_pools(self, pools: dict[str, torch.Tensor], table: torch.Tensor | None = None) -> Region:
        """The same tokens with other pools, for reading: copies of these somewhere else.

        Args:
            pools: of the same parts.
            table: int64 `[rows, most pages]`, where pages are in them; None: where they are in these.
        """
        region, pages = copy(self), copy(self.pages)
        pages.pools = pools
        if table is not None:
            pages.table = table
        region.pages = pages
        return region

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values `[rows, longest, size]` in the model's dtype, zeros past a row's length."""
        keys = self._decoded(_KEYS, self.keys, self.sizes[0])
        return keys, self._decoded(_VALUES, self.values, self.sizes[1])

    def bias(self) -> torch.Tensor | None:
        """float32 `[rows, longest]`, or None where tokens have none."""
        return self.pages.dense("bias")[..., 0] if self.has_bias else None

    def page_keys(self, ids: torch.Tensor) -> torch.Tensor:
        """Keys of `[n]` pages of the pools, `[n, PAGE, size]` in the model's dtype; slots not in use have arbitrary values."""
        pools = {name[len(_KEYS) :]: pool for name, pool in self.pages.pools.items() if name.startswith(_KEYS)}
        parts = {name: pool[ids.to(pool.device)].to(self.device) for name, pool in pools.items()}
        return self.keys.decode(parts, self.sizes[0], self.dtype)

    def _decoded(self, prefix: str, codec: Codec, size: int) -> torch.Tensor:
        pools = self.pages.pools
        parts = {name[len(prefix) :]: self.pages.in_use(name) for name in pools if name.startswith(prefix)}
        return self.pages.spread(codec.decode(parts, size, self.dtype))


def region_attention(
    query: torch.Tensor,
    region: Region,
    scale: float,
    softcap: float = 0.0,
    visible: torch.Tensor | None = None,
    chosen: Chosen | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over one region, in plain torch: the reference that kernels are tested against.

    Args:
        query: `[rows, m, size]`, all queries of a key head.
        region: what is attended to.
        scale: of the scores.
        softcap: 0: none; else scores become softcap * tanh(scores / softcap), before any bias.
        visible: int64 `[rows, m]`: how many of a row's tokens, from the front, a query sees; None: all.
        chosen: what is read; None: all.

    Returns:
        float32 output `[rows, m, value size]` normalized over this region, zeros where a query sees nothing, and the logarithm
        of the sum of exponentials of its scores, float32 `[rows, m]`, minus infinity there. `merge` puts regions together.
    """
    keys, values = region.states()
    scores = query.float() @ keys.float().transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    bias = region.bias()
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    seen = region.pages.used().unsqueeze(1).expand_as(scores)
    if visible is not None:
        seen = seen & (torch.arange(keys.shape[1], device=keys.device) < visible.unsqueeze(-1))
    if chosen is not None:
        seen = seen & chosen_mask(chosen, keys.shape[1]).unsqueeze(1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if not scores.shape[-1]:
        return scores.new_zeros(*query.shape[:2], values.shape[-1]), scores.new_full(query.shape[:2], float("-inf"))
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).nan_to_num(0.0) @ values.float(), lse


def chosen_mask(chosen: Chosen, longest: int) -> torch.Tensor:
    """bool `[rows, longest]`: tokens that are read."""
    rows, most = chosen.index.shape
    columns = -(-longest // chosen.unit)
    mask = torch.zeros(rows, columns + 1, dtype=torch.bool, device=chosen.index.device)
    counted = torch.arange(most, device=mask.device) < chosen.counts[:, None]
    mask.scatter_(1, chosen.index.masked_fill(~counted, columns), True)
    return mask[:, :columns].repeat_interleave(chosen.unit, 1)[:, :longest]


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention over several regions from attention over each: float32 `[rows, m, size]`, zeros where none is seen."""
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([part[1] for part in parts])
    weights = (lse - lse.amax(0).nan_to_num(neginf=0.0)).exp()
    weights = weights / weights.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    return sum(part[0] * weight.unsqueeze(-1) for part, weight in zip(parts, weights, strict=True))  # type: ignore[return-value]


__all__ = ["PAGE", "Chosen", "Region", "chosen_mask", "merge", "region_attention"]
