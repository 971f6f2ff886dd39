"""Keyformer: heavy hitters under Gumbel noise and a rising temperature, which make up for what eviction takes from the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Count, Natural, Positive
from runtime.kv_cache.observation import Observation
from runtime.kv_cache.scores.base import Accumulating

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Keyformer(Accumulating):
    """Sum over queries of softmax((logits + Gumbel noise) / temperature) (Keyformer, arXiv 2403.09054).

    Noise belongs to a token: it depends on the seed, the layer, the head and the token's place in its own sequence, so that it is the
    same in every batch, under any padding and after other tokens were evicted. Queries of prompts have the first temperature; while a
    sequence is generated it rises linearly, as in the paper, over as many tokens as `generation_length` says, since how many there will
    be is not known beforehand. The paper's recent window is a share of the budget, here it is a number of tokens.

    Attributes:
        recent: newest tokens that are always kept.
        temperature: of the queries of prompts.
        last_temperature: of queries from the `generation_length`-th generated token on.
        generation_length: generated tokens over which the temperature rises; the paper's code raises it by 0.01 a token.
        seed: of the noise.
    """

    name: ClassVar[str] = "keyformer"
    wants: ClassVar[frozenset[str]] = frozenset(["positions"])
    temperature: Positive = 1.0
    last_temperature: Positive = 2.0
    generation_length: Count = 100
    seed: Natural = 0

    def added(self, seen: Observation) -> torch.Tensor:
        places = seen.places()
        # Noise of another token would be worse than none: where places are not known, logits count as they are.
        noise = 0.0 if places is None else gumbel(places, seen.groups, self.seed, seen.layer).unsqueeze(3)
        rising = self.temperatures(seen)
        total = torch.zeros(seen.keys.shape[:3], device=seen.keys.device)
        for part, logits in seen.logits():
            tempered = (logits + noise) / rising[part, None]
            total += tempered.softmax(-1).nan_to_num(0.0).sum(3).mean(2)
        return total

    def temperatures(self, seen: Observation) -> torch.Tensor:
        """Of each query, float32 `[w]`: they are those of the newest tokens, of which `seen.generated` were decoded."""
        count = seen.queries.shape[2]
        step = seen.generated - torch.arange(count - 1, -1, -1, device=seen.keys.device)
        share = (step / self.generation_length).clamp(0, 1)
        return self.temperature + (self.last_temperature - self.temperature) * share

    def __call__(self, seen: Observation) -> torch.Tensor:
        return seen.finish(self.total(seen), self.recent)


def gumbel(places: torch.Tensor, groups: int, seed: int, layer: int) -> torch.Tensor:
    """Standard Gumbel noise that depends on nothing but a token's place, its query head, the layer and the seed.

    Args:
        places: int64 `[batch, kv_heads, n]`, of tokens in their sequences.
        groups: query heads of a key head.
        seed: from 0 up.
        layer: index of the layer.

    Returns:
        float32 `[batch, kv_heads, groups, n]`, the same on every device up to the last bits of a logarithm.
    """
    heads = torch.arange(places.shape[1] * groups, device=places.device).view(-1, groups, 1)
    word = _mixed(torch.tensor(seed & _WORD, device=places.device))
    word = _mixed(word ^ layer)
    word = _mixed(word ^ heads)
    word = _mixed(word ^ (places.unsqueeze(2) & _WORD))
    uniform = (word.double() + 0.5) / (_WORD + 1)
    return -torch.log(-torch.log(uniform)).float()


def _mixed(word: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words, held in int64, that spreads every bit: shifts and two multiplications (a hash's finalizer)."""
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _WORD  # both factors below 2 ** 31, so that no product leaves 63 bits
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _WORD
    return word ^ (word >> 15)
