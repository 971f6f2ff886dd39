"""Attention over stored tokens of ragged lengths and new ones, in plain torch: the truth that kernels are tested against."""

from __future__ import annotations

import torch


def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    used: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output of queries that see `used` tokens.

    Args:
        query: `[batch, heads, q, size]`.
        key: `[batch, kv_heads, n, size]`, whatever past the tokens in use.
        value: `[batch, kv_heads, n, size]`.
        used: bool, broadcast to `[batch, kv_heads, q, n]`: which tokens a query sees.
        scale: of the scores.
        softcap: 0: none.
        bias: float32 `[batch, kv_heads, n]`, added to the scores; None: none.

    Returns:
        `[batch, heads, q, size]` in the query's dtype. A query that sees nothing gives zeros.
    """
    batch, heads, count, size = query.shape
    kv_heads = key.shape[1]
    # Query heads of a key head side by side: torch would copy the keys for each of them otherwise.
    grouped = query.float().reshape(batch, kv_heads, -1, size) * scale
    scores = (grouped @ key.float().transpose(-1, -2)).view(batch, kv_heads, heads // kv_heads, count, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[:, :, None, None]
    scores = scores.masked_fill(~used.unsqueeze(2), float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    seen = used.any(2).unsqueeze(-1)
    values = value.float().masked_fill(~seen, 0.0)  # what lies in unused slots may be anything, NaN too
    output = weights.view(batch, kv_heads, -1, weights.shape[-1]) @ values
    return output.view(batch, heads, count, -1).to(query.dtype)
