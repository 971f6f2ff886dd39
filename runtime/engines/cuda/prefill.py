"""Attention of chunks of many tokens: each token sees its sequence's earlier ones in the cache, and those of its chunk before it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from runtime.engines.cuda.cache import CacheLayer

# All chunks of a step in one call: torch's variable-length flash attention, where it computes what it should.

_log = logging.getLogger("compress.engine")


class Ends:
    """Where the chunks' queries and keys end, on the device, and the longest of each."""

    def __init__(self, starts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        keys = [start + count for start, count in zip(starts, counts, strict=True)]
        ends = [[0, *accumulate(counts)], [0, *accumulate(keys)]]
        self.queries, self.keys = torch.tensor(ends, dtype=torch.int32).to(device)
        self.most_queries, self.most_keys = max(counts), max(keys)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Ends, scale: float, window: int) -> torch.Tensor:
    """`[rows, heads, head_dim]`; keys and values of the chunks one after another, `[sum of lengths, kv_heads, head_dim]`."""
    found: Any = varlen_attn(
        q, k, v, ends.queries, ends.keys, ends.most_queries, ends.most_keys,
        scale=scale, window_size=(window - 1 if window else -1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return found


@cache
def is_exact(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, windowed: bool) -> bool:
    """Whether `attend` gives the right numbers here: tried once, on chunks with and without a cached beginning."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    starts, counts, window = [0, 21, 3], [9, 5, 17], 6 if windowed else 0
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, size, generator=generator).to(device, dtype)

    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    q, k, v = random(sum(counts), heads), random(sum(lengths), kv_heads), random(sum(lengths), kv_heads)
    chunks = zip(q.split(counts), k.split(lengths), v.split(lengths), starts, strict=True)
    wanted = torch.cat([chunk_attention(*chunk, size**-0.5, window) for chunk in chunks]).float()
    try:
        found = attend(q, k, v, Ends(starts, counts, device), size**-0.5, window).float()
        error = float((found - wanted).abs().max())
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as problem:
        _log.info("variable-length attention does not run here: %s", problem)
        return False
    if not error < 0.05:
        _log.warning("variable-length attention is off by %.3g here and is not used", error)
        return False
    return True


MOST_SCORES = 1 << 25  # of a mask: longer chunks are cut


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, window: int
) -> torch.Tensor:
    """Causal attention of one chunk.

    Args:
        q: `[tokens, heads, head_dim]`, at positions start ...
        k, v: `[start + tokens, kv_heads, head_dim]`.
        window: each token sees the last `window` positions, its own included; 0: all.
    """
    tokens, heads, _ = q.shape
    ends = k.shape[0]
    first = max(0, start + 1 - window) if window else 0  # nobody sees what lies before
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k[first:], v[first:]))
    grouped = heads != k.shape[1]
    if start == 0 and (not window or window >= tokens):
        y = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return y[0].transpose(0, 1)
    if grouped:  # with a mask, the fused kernels want as many heads on both sides
        keys, values = (t.repeat_interleave(heads // k.shape[1], dim=1) for t in (keys, values))
    out = []
    step = max(1, MOST_SCORES // (ends - first))
    place = torch.arange(first, ends, device=q.device)[None]
    for begin in range(0, tokens, step):
        at = torch.arange(start + begin, start + min(tokens, begin + step), device=q.device)[:, None]
        mask = place <= at
        if window:
            mask &= place > at - window
        part = queries[:, :, begin : begin + step]
        out.append(functional.scaled_dot_product_attention(part, keys, values, attn_mask=mask, scale=scale))
    return torch.cat(out, dim=2)[0].transpose(0, 1)


class ChunkAttention:
    """Attention of the chunks of a step, whose rows lie one after another.

    Args:
        starts: position of each chunk's first token. counts: its tokens.
        slots: int64, on the device: where the positions 0 .. start + count - 1 of each chunk's sequence are in the cache, one
            chunk after another.
    """

    def __init__(self, starts: Sequence[int], counts: Sequence[int], slots: torch.Tensor, scale: float) -> None:
        self._starts, self._counts, self._slots, self._scale = list(starts), list(counts), slots, scale
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self._ends: Ends | None = None

    def __call__(self, q: torch.Tensor, layer: CacheLayer, window: int) -> torch.Tensor:
        """`[rows, heads, head_dim]`."""
        k, v = (tensor.flatten(0, 1)[self._slots] for tensor in layer)
        if q.device.type == "cuda" and is_exact(q.device, q.dtype, *q.shape[1:2], *k.shape[1:], window > 0):
            if self._ends is None:
                self._ends = Ends(self._starts, self._counts, q.device)
            return attend(q, k, v, self._ends, self._scale, window)
        chunks = zip(q.split(self._counts), k.split(self._lengths), v.split(self._lengths), self._starts, strict=True)
        return torch.cat([chunk_attention(*chunk, self._scale, window) for chunk in chunks])
