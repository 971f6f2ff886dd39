"""Stored pages (older KV pages in few bits) in plain torch: the kernels' reference, and attention of prompts on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.engines.cuda.cache import CacheLayer, StoredLayers
from runtime.kv_cache.pages import PAGE as BLOCK
from runtime.kv_cache.storage.base import StateError

MOST_SCORES = 1 << 25  # of a mask: longer chunks are cut


def store(stored: StoredLayers, pages: Tensor) -> None:
    """Store pages (int `[n]`) that are plain, and whose tokens are all there, in few bits too; `invalid` says where that is impossible."""
    at = pages.long()
    places = stored.places[at].long()
    for side, codec in stored.codecs.items():
        plain = (stored.keys if side == "keys" else stored.values)[:, places]
        layers, count, page, heads, size = plain.shape
        blocks = plain.view(layers, count, page // BLOCK, BLOCK, heads, size).permute(0, 1, 4, 2, 3, 5)
        try:
            packed = codec.encode(blocks.reshape(-1, BLOCK, size))
        except StateError:
            stored.invalid.fill_(1)
            continue
        for name, pool in stored.pools_of(side).items():
            pool[:, at] = packed.parts[name].view(layers, count, *pool.shape[2:])


def decoded(stored: StoredLayers, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of stored pages (int64 `[n]`) of the first of the layers, `[n * page_size, kv_heads, head_dim]`."""
    _, _, page, heads, size = stored.keys.shape
    out = []
    for side, codec in stored.codecs.items():
        pools = {name: pool[0][pages] for name, pool in stored.pools_of(side).items()}
        blocks = codec.decode({name: pool.flatten(0, 2) for name, pool in pools.items()}, size, stored.keys.dtype)
        found = blocks.view(len(pages), heads, page // BLOCK, BLOCK, size).permute(0, 2, 3, 1, 4)
        out.append(found.reshape(-1, heads, size))
    return out[0], out[1]


def states(layer: CacheLayer, tables: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What queries at `positions` `[rows]` see in pages `tables` `[rows, pages]`: `[rows, pages * page_size, kv_heads, head_dim]` each."""
    stored, chosen = layer.stored, tables.long()
    assert stored is not None
    page = layer.keys.shape[1]
    at = torch.arange(chosen.shape[1], device=chosen.device)
    old = (at >= stored.first) & (at < stored.begin_of_recent(positions.long()[:, None]))
    old = old.repeat_interleave(page, 1)[:, :, None, None]
    places = stored.places[chosen].long()
    few_bits = decoded(stored, chosen.flatten())
    plain = (layer.keys[places].flatten(1, 2), layer.values[places].flatten(1, 2))
    return tuple(torch.where(old, a.view(b.shape), b) for a, b in zip(few_bits, plain, strict=True))  # type: ignore[return-value]


def chunk_attention(q: Tensor, layer: CacheLayer, pages: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of one chunk, each query over the pages as it sees them.

    Args:
        q: `[tokens, heads, head_dim]`, at positions start ...
        layer: of the cache; the pages are written and stored.
        pages: int `[n]`, of the sequence, up to the chunk's end.
    """
    stored = layer.stored
    assert stored is not None
    page, end, pages = layer.keys.shape[1], start + len(q), pages.long()
    first, begin, stop = stored.first, stored.begin_of_recent(start), stored.begin_of_recent(end - 1)
    # Pages that some query sees stored, then those that some query sees plain.
    plain = torch.cat([torch.arange(min(first, len(pages))), torch.arange(begin, len(pages))]).to(q.device)
    few_bits = decoded(stored, pages[first:stop])
    places = stored.places[pages[plain]].long()
    keys, values = (
        torch.cat([few, side[places].flatten(0, 1)])
        for few, side in zip(few_bits, (layer.keys, layer.values), strict=True)
    )
    at = torch.cat([torch.arange(first, max(first, stop), device=q.device), plain]).repeat_interleave(page)
    place = at * page + torch.arange(page, device=q.device).repeat(len(at) // page)
    old = torch.arange(len(at), device=q.device) < max(0, stop - first) * page
    # Never written, or by a sequence that is gone: what is masked is multiplied all the same, and 0 * NaN is NaN.
    keys, values = (each.masked_fill((place >= end)[:, None, None], 0.0) for each in (keys, values))

    def seen(mine: Tensor) -> Tensor:
        recent = stored.begin_of_recent(mine)
        return (place <= mine) & torch.where(old, at < recent, (at < first) | (at >= recent))

    return masked_attention(q, keys, values, start, scale, seen)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, seen: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention of one chunk, `[tokens, heads, head_dim]`, some queries at a time.

    Args:
        q: `[tokens, heads, head_dim]`, at positions start ...
        k, v: `[n, kv_heads, head_dim]`.
        seen: of positions of queries, int64 `[m, 1]`, the mask of the keys that each sees, bool `[m, n]`.
    """
    queries, keys, values = (each.transpose(0, 1)[None] for each in (q, k, v))
    if queries.shape[1] != keys.shape[1]:  # with a mask, the fused kernels want as many heads on both sides
        keys, values = (each.repeat_interleave(queries.shape[1] // each.shape[1], dim=1) for each in (keys, values))
    out, step = [], max(1, MOST_SCORES // keys.shape[2])
    for first in range(0, len(q), step):
        part = queries[:, :, first : first + step]
        at = torch.arange(start + first, start + first + part.shape[2], device=q.device)[:, None]
        out.append(functional.scaled_dot_product_attention(part, keys, values, attn_mask=seen(at), scale=scale))
    return torch.cat(out, dim=2)[0].transpose(0, 1)
