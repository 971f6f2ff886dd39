"""Floats as the model computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.storage.base import Packed, Part


@dataclass(frozen=True)
class Plain:
    """The model's own dtype. Parts: `codes` `[pages, PAGE, size]`."""

    name: ClassVar[str] = "plain"

    def parts(self, size: int, dtype: torch.dtype) -> dict[str, Part]:
        """Stored tensors for a head of `size` channels: the states in the model's dtype."""
        return {"codes": Part(size, dtype)}

    def encode(self, states: torch.Tensor) -> Packed:
        """The states as they are."""
        return Packed({"codes": states})

    def decode(self, parts: dict[str, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """The states as they are."""
        return parts["codes"].to(dtype)
