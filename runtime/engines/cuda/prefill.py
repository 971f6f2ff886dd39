"""Attention of pieces of many tokens: each token sees its sequence's earlier ones in the cache, and those of its piece before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from runtime.engines.cuda import varlen

MOST_SCORES = 1 << 25  # of a mask: longer pieces are cut


def piece_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, window: int
) -> torch.Tensor:
    """Causal attention of one piece.

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


class PieceAttention:
    """Attention of the pieces of a step, whose rows lie one after another.

    Args:
        starts: position of each piece's first token. counts: its tokens.
        slots: int64, on the device: where the positions 0 .. start + count - 1 of each piece's sequence are in the cache, one
            piece after another.
    """

    def __init__(self, starts: Sequence[int], counts: Sequence[int], slots: torch.Tensor, scale: float) -> None:
        self._starts, self._counts, self._slots, self._scale = list(starts), list(counts), slots, scale
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self._ends: varlen.Ends | None = None

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
        """`[rows, heads, head_dim]`, given one layer of the cache `[pages, page_size, kv_heads, head_dim]`."""
        k, v = (tensor.flatten(0, 1)[self._slots] for tensor in (keys, values))
        if q.device.type == "cuda" and varlen.works(q.device, q.dtype, *q.shape[1:2], *k.shape[1:], window > 0):
            if self._ends is None:
                self._ends = varlen.Ends(self._starts, self._counts, q.device)
            return varlen.attend(q, k, v, self._ends, self._scale, window)
        pieces = zip(q.split(self._counts), k.split(self._lengths), v.split(self._lengths), self._starts, strict=True)
        return torch.cat([piece_attention(*piece, self._scale, window) for piece in pieces])
