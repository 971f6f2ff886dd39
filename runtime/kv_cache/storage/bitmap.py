"""Unstructured sparsity: a token's largest channels and a bit for each channel (Mustafar)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Lt

from runtime.config.settings import Settings
from runtime.kv_cache.storage.base import Codec, Packed


@dataclass(frozen=True)
class Bitmap(Settings, Codec):
    """Of each token the largest channels by magnitude, as many of each (Mustafar, arXiv 2505.22913).

    Parts: `mask` uint8 `[pages, PAGE, ceil(size / 8)]`, bit c % 8 of byte c // 8 for channel c; `codes` `[pages, PAGE, kept]` in the
    model's dtype, kept channels in ascending order.

    Attributes:
        sparsity: share of the channels that is dropped, in (0, 1).
    """

    name: ClassVar[str] = "bitmap"
    sparsity: Annotated[float, Gt(0), Lt(1)] = 0.5

    def kept(self, size: int) -> int:
        """Channels of a token that are held."""
        return max(1, round(size * (1 - self.sparsity)))

    def encode(self, states: torch.Tensor) -> Packed:
        """The entries of largest magnitude of each token and the mask of where they are."""
        size = states.shape[-1]
        chosen = states.abs().topk(self.kept(size), -1).indices.sort(-1).values
        mask = torch.zeros(*states.shape[:-1], -(-size // 8) * 8, dtype=torch.uint8, device=states.device)
        mask.scatter_(-1, chosen, 1)
        bits = mask.view(*states.shape[:-1], -1, 8) << torch.arange(8, dtype=torch.uint8, device=states.device)
        return Packed({"mask": bits.sum(-1, dtype=torch.uint8), "codes": states.gather(-1, chosen)})

    def decode(self, parts: dict[str, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """Dense states `[..., size]`, zero where nothing was stored."""
        mask = parts["mask"]
        bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
        bits = bits.flatten(-2)[..., :size]
        # The n-th set bit of a token takes its n-th code.
        places = (bits.cumsum(-1) - 1).clamp(min=0)
        return (parts["codes"].gather(-1, places) * bits).to(dtype)
