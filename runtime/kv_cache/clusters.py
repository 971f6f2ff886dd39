"""Clustering: similar keys of a chunk become one centroid, which stands for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.config.settings import Natural, NonNegative
from runtime.kv_cache.pages import PAGE


@dataclass(frozen=True)
class Clusters:
    """Alternating soft matching within chunks (KV cache clustering).

    A chunk's tokens are dealt alternately to two sides; those of one side that are most like their nearest of the other are merged into
    it, half of what is left at most in a round, until `ratio` of the chunk is left. A centroid of n tokens has the mean of their keys and
    values, and log(n) is added to its attention logits: exact where the keys are equal.

    Attributes:
        ratio: tokens of a chunk that are left; times `chunk` it must be a multiple of 32.
        chunk: tokens that are matched with each other, a multiple of 32.
    """

    name: ClassVar[str] = "clusters"
    ratio: NonNegative = 0.5
    chunk: Natural = 128

    @property
    def kept(self) -> int:
        """Tokens that a merged chunk has left."""
        return round(self.ratio * self.chunk)

    def __post_init__(self) -> None:
        if self.chunk <= 0 or self.chunk % PAGE:
            raise ValueError(f"clusters.chunk must be a multiple of {PAGE} above 0, not {self.chunk}")
        if not 0 < self.ratio < 1 or self.kept % PAGE or abs(self.kept - self.ratio * self.chunk) > 1e-6:
            steps = ", ".join(f"{PAGE * i / self.chunk:g}" for i in range(1, self.chunk // PAGE))
            raise ValueError(
                f"clusters.ratio {self.ratio} does not leave whole pages of {PAGE} of {self.chunk} tokens: allowed are {steps}"
            )

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Merge chunks, `[chunks, chunk, size]` each.

        Returns:
            Centroids: keys and values `[chunks, kept, size]`, and how many tokens each stands for, float32 `[chunks, kept]`.
        """
        sums = torch.cat([keys.float(), values.float(), keys.new_ones(*keys.shape[:2], 1, dtype=torch.float32)], -1)
        while sums.shape[1] > self.kept:
            sums = _round(sums, keys.shape[-1], min(sums.shape[1] - self.kept, sums.shape[1] // 2))
        of_keys, of_values, counts = sums.split((keys.shape[-1], values.shape[-1], 1), -1)
        return (of_keys / counts).to(keys.dtype), (of_values / counts).to(values.dtype), counts[..., 0]


def _round(sums: torch.Tensor, size: int, remove: int) -> torch.Tensor:
    """Merge `remove` tokens at even positions into their nearest at odd ones.

    Args:
        sums: over the tokens of each cluster, their keys of `size` channels, their values, and 1.
    """
    normed = torch.nn.functional.normalize(sums[..., :size] / sums[..., -1:], dim=-1)
    similarity, nearest = (normed[:, 0::2] @ normed[:, 1::2].transpose(1, 2)).max(-1)
    del normed
    order = similarity.argsort(dim=-1, descending=True, stable=True)
    gone, stay = order[:, :remove], order[:, remove:].sort(-1).values
    target = nearest.gather(1, gone).unsqueeze(-1).expand(-1, -1, sums.shape[-1])
    even, odd = sums[:, 0::2], sums[:, 1::2]
    odd = odd.scatter_add(1, target, even.take_along_dim(gone.unsqueeze(-1), 1))
    return torch.cat([even.take_along_dim(stay.unsqueeze(-1), 1), odd], 1)
