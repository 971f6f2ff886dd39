"""Float8 (e4m3), one scale a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.kv_cache.storage.base import Codec, Packed, StateError

_KIND = torch.float8_e4m3fn
_MOST = torch.finfo(_KIND).max


@dataclass(frozen=True)
class Float8(Codec):
    """x = scale * code. Parts: `codes` float8_e4m3fn `[pages, PAGE, size]`, `scale` float32 `[pages, PAGE, 1]`."""

    name: ClassVar[str] = "fp8"

    def encode(self, states: torch.Tensor) -> Packed:
        """Raises StateError where a state is not finite."""
        exact = states.float()
        largest = exact.abs().amax(-1, keepdim=True)
        if not bool(largest.isfinite().all()):
            text = "a key or value is not finite, which fp8 cannot hold"
            raise StateError(f"{text}; compute in a wider dtype (float32, bfloat16), or take keys and values: plain")
        scale = (largest / _MOST).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (exact / scale).clamp(-_MOST, _MOST).to(_KIND)
        return Packed({"codes": codes, "scale": scale})

    def decode(self, parts: dict[str, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """Codes times their scale, `[..., size]`."""
        return (parts["codes"].float() * parts["scale"]).to(dtype)
