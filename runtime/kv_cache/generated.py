"""The part of an observation that scores may choose from where prompts stay whole: what was generated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from runtime.kv_cache.observation import Observation


@dataclass(frozen=True)
class Generated:
    """Tokens of an observation without those that came in prompts.

    Attributes:
        seen: them alone, `[batch, kv_heads, m, ...]` in the order of arrival; `ages` still count all tokens that came after each.
        places: int64 `[batch, kv_heads, m]`, where each was among all; whatever where `seen.ages` is negative.
        beside: int64 `[batch, kv_heads]`, how many tokens are left out.
    """

    seen: Observation
    places: torch.Tensor
    beside: torch.Tensor

    @classmethod
    def of(cls, whole: Observation, given: torch.Tensor) -> Generated:
        """Leave out the tokens that are `given`, bool `[batch, kv_heads, n]`, and those that are pinned."""
        first = torch.arange(given.shape[-1], device=given.device) < whole.pinned
        wanted = whole.held & ~given & ~first
        counts = wanted.sum(-1, keepdim=True)
        longest = max(1, int(counts.max()))
        places = (~wanted).to(torch.uint8).argsort(dim=-1, stable=True)[..., :longest]

        def taken(states: torch.Tensor) -> torch.Tensor:
            return states.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))

        seen = replace(
            whole,
            keys=taken(whole.keys),
            values=taken(whole.values),
            ages=whole.ages.gather(-1, places).masked_fill(torch.arange(longest, device=given.device) >= counts, -1),
            mass=None if whole.mass is None else whole.mass.gather(-1, places),
            positions=None if whole.positions is None else whole.positions.gather(-1, places),
            pinned=0,
        )
        return cls(seen, places, whole.held.sum(-1) - counts[..., 0])

    def spread(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """`whole` `[batch, kv_heads, n]` with the numbers `part` `[batch, kv_heads, m]` of these tokens in their places."""
        return whole.scatter(-1, self.places, torch.where(self.seen.held, part, whole.gather(-1, self.places)))
