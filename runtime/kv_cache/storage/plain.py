"""Floats as the model computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.storage.base import Codec, Packed


@dataclass(frozen=True)
class Plain(Codec):
    """The model's own dtype. Parts: `codes` `[pages, PAGE, size]`."""

    name: ClassVar[str] = "plain"

    def encode(self, states: torch.Tensor) -> Packed:
        """The states as they are."""
        return Packed({"codes": states})

    def decode(self, parts: dict[str, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """The states as they are."""
        return parts["codes"].to(dtype)
