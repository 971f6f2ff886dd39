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
        sums_k, sums_v = keys.float(), values.float()
        counts = torch.ones(keys.shape[:2], device=keys.device)
        while counts.shape[1] > self.kept:
            remove = min(counts.shape[1] - self.kept, counts.shape[1] // 2)
            sums_k, sums_v, counts = _round(sums_k, sums_v, counts, remove)
        wide = counts.unsqueeze(-1)
        return (sums_k / wide).to(keys.dtype), (sums_v / wide).to(values.dtype), counts


def _round(
    keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, remove: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge `remove` tokens at even positions into their nearest at odd ones; states are sums over a cluster's tokens."""
    means = keys / counts.unsqueeze(-1)
    normed = torch.nn.functional.normalize(means, dim=-1)
    similarity, nearest = (normed[:, 0::2] @ normed[:, 1::2].transpose(1, 2)).max(-1)
    order = similarity.argsort(dim=-1, descending=True, stable=True)
    gone, stay = order[:, :remove], order[:, remove:].sort(-1).values
    target = nearest.gather(1, gone)

    def merged(tensor: torch.Tensor) -> torch.Tensor:
        even, odd = tensor[:, 0::2], tensor[:, 1::2].clone()
        wide = (-1, -1, *tensor.shape[2:])
        pick = (lambda index: index.unsqueeze(-1).expand(wide)) if tensor.dim() == 3 else (lambda index: index)
        odd.scatter_add_(1, pick(target), even.gather(1, pick(gone)))
        return torch.cat([even.gather(1, pick(stay)), odd], 1)

    return merged(keys), merged(values), merged(counts)
