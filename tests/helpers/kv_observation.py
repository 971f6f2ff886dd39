"""Random observations of attention for KV scores."""

from __future__ import annotations

import torch

from runtime.kv_cache.observation import Observation


# ---------------------------------------------------------------- scores
def observation(width: int = 6, count: int = 20) -> Observation:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([[count, count], [count - 5, count - 9]])
    ages = lengths[..., None] - 1 - torch.arange(count)
    shape = (2, 2, count, 8)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return Observation(torch.randn(2, 4, width, 8, generator=generator), keys, values, ages, 8**-0.5)


def weights(seen: Observation) -> torch.Tensor:
    """`[batch, kv_heads, groups, w, n]`, query by query and key by key."""
    batch, heads, width, _ = seen.queries.shape
    count = seen.keys.shape[2]
    result = torch.zeros(batch, heads, width, count)
    for b in range(batch):
        for h in range(heads):
            for i in range(width):
                ages = seen.ages[b, h // seen.groups]
                allowed = (ages >= width - 1 - i).nonzero().flatten()
                scores = seen.keys[b, h // seen.groups, allowed] @ seen.queries[b, h, i] * seen.scale
                result[b, h, i, allowed] = scores.softmax(0)
    return result.view(batch, heads // seen.groups, seen.groups, width, count)
