"""Which tokens of a layer stay when it is cut, by their scores."""

from __future__ import annotations

import torch


def best_places(score: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of each head's best tokens, in the order of arrival; of equal scores the newer token is better.

    Args:
        score: `[batch, kv_heads, n]`, minus infinity where there is no token.
        counts: int64 `[batch, kv_heads]`, how many stay, no more than there are.

    Returns:
        int64 `[batch, kv_heads, most]`, ascending, whatever of the places behind a head's last; and bool, which of them count.
    """
    end, longest = score.shape[-1], max(1, int(counts.max()))
    best = end - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :longest]
    wanted = torch.arange(longest, device=score.device) < counts.unsqueeze(-1)
    # Unwanted places sort behind all others, so that what is kept stays in the order of arrival.
    return best.masked_fill(~wanted, end).sort(-1).values.clamp(max=end - 1), wanted


def newest_run(places: torch.Tensor, counts: torch.Tensor, score: torch.Tensor) -> int:
    """How many of the newest tokens every head still has, one after the other.

    Args:
        places: int64 `[batch, kv_heads, most]`, what is kept, ascending.
        counts: int64 `[batch, kv_heads]`, how many of them.
        score: `[batch, kv_heads, n]`, minus infinity where there was no token.
    """
    ends = (score > float("-inf")).sum(-1, keepdim=True) - 1
    from_end = counts.unsqueeze(-1) - 1 - torch.arange(places.shape[-1], device=places.device)
    # A token is part of the run if as many newer ones are kept as there were; behind a head's last there is nothing.
    gaps = ((ends - places) != from_end) & (from_end >= 0)
    first = torch.where(gaps, from_end, counts.unsqueeze(-1)).amin(-1)
    return int(first.min())
