"""Attention of pieces of many tokens: each token sees its sequence's earlier ones in the cache, and those of its piece before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

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
        y = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
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
        starts: position of each piece's first token. counts: its tokens. pages: of its sequence, int64, on the device.
    """

    def __init__(self, starts: Sequence[int], counts: Sequence[int], pages: Sequence[torch.Tensor], scale: float) -> None:
        self._pieces = list(zip(starts, counts, pages, strict=True))
        self._scale = scale

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
        """`[rows, heads, head_dim]`, given one layer of the cache `[pages, page_size, kv_heads, head_dim]`."""
        out = torch.empty_like(q)
        row = 0
        for start, count, pages in self._pieces:
            k, v = (t[pages].flatten(0, 1)[: start + count] for t in (keys, values))
            out[row : row + count] = piece_attention(q[row : row + count], k, v, start, self._scale, window)
            row += count
        return out
