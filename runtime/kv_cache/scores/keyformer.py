"""Keyformer: heavy hitters under Gumbel noise and a rising temperature, which make up for what eviction takes from the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.observation import Observation


@dataclass(frozen=True)
class Keyformer:
    """Sum over queries of softmax((logits + Gumbel noise) / temperature) (Keyformer, arXiv 2403.09054).

    Attributes:
        recent: newest tokens that are always kept.
        temperature: of the first query; it rises linearly to `last_temperature`.
        last_temperature: of the last one.
        seed: of the noise, one draw a slot and head, so that the same prompt gives the same cache.
    """

    name: ClassVar[str] = "keyformer"
    recent: int = 32
    temperature: float = 1.0
    last_temperature: float = 2.0
    seed: int = 0

    def window(self, count: int) -> int:
        return count

    def kept(self) -> int:
        return self.recent

    def added(self, seen: Observation) -> torch.Tensor:
        kv_heads, count = seen.keys.shape[1:3]
        generator = torch.Generator().manual_seed(self.seed)
        uniform = torch.rand(kv_heads, seen.groups, 1, count, generator=generator).clamp(1e-10, 1 - 1e-7)
        noise = -torch.log(-torch.log(uniform)).to(seen.keys.device)
        # Queries of a prompt see all temperatures; those of single steps, when some tokens are gone, the last.
        first = self.temperature if seen.queries.shape[2] >= count else self.last_temperature
        rising = torch.linspace(first, self.last_temperature, seen.queries.shape[2], device=noise.device)
        total = torch.zeros(seen.keys.shape[:3], device=noise.device)
        for part, logits in seen.logits():
            tempered = (logits + noise) / rising[part, None]
            total += tempered.softmax(-1).nan_to_num(0.0).sum(3).mean(2)
        return total

    def __call__(self, seen: Observation) -> torch.Tensor:
        return seen.finish(self.added(seen) if seen.mass is None else seen.mass, self.recent)
