"""Attention of a few new tokens over what is stored, region by region and as it is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kv_cache.kernels import attend_region
from runtime.kv_cache.region import Chosen, Region, merge
from runtime.kv_cache.selection.base import Queries

if TYPE_CHECKING:
    from runtime.kv_cache.layer import CompressedLayer


def step_attention(
    layer: CompressedLayer, query: torch.Tensor, valid: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Outputs `[batch, heads, q, size]` in the query's dtype, zeros at padding; the new tokens are in the layer's tail already.

    Args:
        layer: whose tokens are attended to.
        query: `[batch, heads, q, size]`.
        valid: bool `[batch, q]`, False at padding on the left; None: there is none.
        scale: of the scores.
        softcap: 0: none.

    Raises:
        ValueError: what the layer holds does not go with its selection.
    """
    assert layer.store is not None
    batch, heads = layer.shape
    count, size = query.shape[2:]
    rows = query.reshape(batch * heads, -1, size)  # a key head's queries, head by head
    groups = rows.shape[1] // count
    counted = None if valid is None else valid.repeat_interleave(heads, 0).repeat(1, groups)
    regions, tail = layer.store.regions, layer.store.tail
    chosen: list[Chosen | None] = [None] * len(regions)
    if layer.selection is not None:
        chosen = layer.selection.choose(layer, Queries(rows, count, scale, softcap, counted), regions)
    visible = None
    if count > 1:
        newer = torch.arange(count - 1, -1, -1, device=query.device).repeat(groups)
        # A row's new tokens are its tail's last; what padding would see is dropped in the end, and may be nothing.
        visible = (tail.lengths[:, None] - newer).clamp(min=0)
    pieces = [
        attend_region(rows, near, scale, softcap, visible if region is tail else None, some)
        for region, near, some in zip(regions, _near(layer, regions, chosen), chosen, strict=True)
    ]
    if layer.elsewhere is not None:
        layer.elsewhere.leave(layer.store.tiers)
    output = merge(pieces).view(batch, query.shape[1], count, -1).to(query.dtype)
    return output if valid is None else output.masked_fill(~valid[:, None, :, None], 0)


def _near(layer: CompressedLayer, regions: list[Region], chosen: list[Chosen | None]) -> list[Region]:
    """The regions where attention can read what was chosen of them; the next layer's are on their way from now on."""
    if layer.elsewhere is None or layer.store is None:
        return regions
    far = [number for number, region in enumerate(regions) if any(region is tier for tier in layer.store.tiers)]
    result = list(regions)
    wanted = [chosen[number] for number in far]
    near = layer.elsewhere.near([regions[number] for number in far], wanted)
    for number, region in zip(far, near, strict=True):
        result[number] = region
    layer.reads_all = all(some is None for some in wanted)
    following = layer.following
    # What a layer will choose is not known before its turn; where it chose the last time, nothing is fetched in advance.
    if following not in (None, layer) and following.store is not None and following.reads_all:
        layer.elsewhere.fetch(following.store.tiers)
    return result
