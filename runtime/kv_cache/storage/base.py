"""Interface of a storage codec: keys or values of whole pages in memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, cast

import torch

from runtime.kv_cache.pages import PAGE, PageTensor

Part = PageTensor  # as codecs of other packages know it
Axis = Literal["token", "channel"]
#: Codes of so many channels lie together; a head's size is padded to a multiple of it.
BLOCK = 32


@dataclass(frozen=True)
class Packed:
    """Pages of keys or values as stored, ready to be put into pools.

    Attributes:
        parts: {name: `[pages, PAGE, width]` or, of parts that a page has once, `[pages, width]`}.
    """

    parts: dict[str, torch.Tensor]


class StateError(ValueError):
    """A key or value that a codec cannot hold; the message says what can."""


class Codec(Protocol):
    """One way to hold keys or values. A file each in this folder; its fields are those of the recipe."""

    @property
    def name(self) -> str:
        """In recipes ("int4", "fp8", ...)."""

    def parts(self, size: int, dtype: torch.dtype) -> dict[str, Part]:
        """The tensors that pages of heads of `size` channels consist of, as `encode` makes them; `dtype` is the model's."""
        return _parts_of(cast(Hashable, self), size, dtype)

    def encode(self, states: torch.Tensor) -> Packed:
        """Whole pages, `[pages, PAGE, size]` in the model's dtype."""

    def decode(self, parts: dict[str, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """What `encode` made of it, `[pages, PAGE, size]` in `dtype`: the reference that kernels are tested against."""


@cache
def _parts_of(codec: Any, size: int, dtype: torch.dtype) -> dict[str, Part]:
    packed = codec.encode(torch.zeros(1, PAGE, size, dtype=dtype, device="cpu"))
    return {name: Part(part.shape[-1], part.dtype, part.dim() == 2) for name, part in packed.parts.items()}


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` (2, 4 or 8) along the last axis, uint8.

    Of a block of 32 codes byte b holds codes b, b + w, b + 2w, ... from its lowest bits up, w = 4 * bits bytes a block: kernels
    take a field of all bytes at once and have neighbours.

    Args:
        codes: integers in [0, 2 ** bits) `[..., size]`; padded with 0 to a multiple of 32.

    Returns:
        uint8 `[..., ceil(size / 32) * 4 * bits]`.
    """
    size = codes.shape[-1]
    blocks = -(-size // BLOCK)
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, blocks * BLOCK - size))
    fields = padded.view(*codes.shape[:-1], blocks, 8 // bits, 4 * bits)
    packed = fields[..., 0, :].clone()
    for field in range(1, 8 // bits):
        packed |= fields[..., field, :] << (field * bits)
    return packed.flatten(-2)


def unpack_codes(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """The codes back, uint8 `[..., size]`."""
    blocks = packed.shape[-1] // (4 * bits)
    bytes_ = packed.view(*packed.shape[:-1], blocks, 1, 4 * bits)
    fields = [bytes_ >> (field * bits) & (2**bits - 1) for field in range(8 // bits)]
    return torch.cat(fields, -2).flatten(-3)[..., :size]


__all__ = ["BLOCK", "PAGE", "Axis", "Codec", "Packed", "Part", "pack_codes", "unpack_codes"]
