"""Attention over stored tokens of ragged lengths and new ones, in plain torch: the reference that kernels are tested against."""

from __future__ import annotations

import torch

#: Of keys or values of a narrow dtype that are float32 at a time.
BLOCK_BYTES = 4 << 20


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
    scores = scores_of(grouped, key, softcap).view(batch, kv_heads, heads // kv_heads, count, -1)
    if bias is not None:
        scores += bias[:, :, None, None]
    scores.masked_fill_(~used.unsqueeze(2), float("-inf"))
    weights = scores.softmax(-1).nan_to_num_(0.0).view(batch, kv_heads, -1, key.shape[2])
    del scores
    output = query.new_zeros(batch, kv_heads, weights.shape[2], value.shape[-1], dtype=torch.float32)
    for part in blocks(value):
        # What lies in unused slots may be anything, NaN too.
        seen = used[..., part].any(2).unsqueeze(-1)
        output += weights[..., part] @ value[:, :, part].float().masked_fill(~seen, 0.0)
    return output.view(batch, heads, count, -1).to(query.dtype)


def scores_of(query: torch.Tensor, key: torch.Tensor, softcap: float = 0.0) -> torch.Tensor:
    """Products of queries and keys, float32 `[batch, kv_heads, m, n]`; keys of a narrow dtype are widened a block at a time.

    Args:
        query: float32 `[batch, kv_heads, m, size]`, all queries of a key head, scaled.
        key: `[batch, kv_heads, n, size]`.
        softcap: 0: none; else scores become softcap * tanh(scores / softcap).
    """
    if key.dtype == torch.float32:
        scores = query @ key.transpose(-1, -2)
    else:
        scores = query.new_empty(*query.shape[:3], key.shape[2])
        for part in blocks(key):
            scores[..., part] = query @ key[:, :, part].float().transpose(-1, -2)
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def blocks(states: torch.Tensor) -> list[slice]:
    """Runs of tokens of `[batch, kv_heads, n, size]` that are about `BLOCK_BYTES` in float32 each."""
    count = states.shape[2]
    step = max(1, BLOCK_BYTES * count // max(1, 4 * states.numel()))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
