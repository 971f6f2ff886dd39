"""2:4 positions: the nibbles `i0 | i1 << 2` of format `sparse24` as numbers of pairs (0 to 5), which is what kernels look up.

Two quads a byte, the earlier one in the low nibble, both here and there.
"""

from __future__ import annotations

from functools import cache

import torch

_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # PAIR of sparse.h


def from_metadata(metadata: torch.Tensor) -> torch.Tensor:
    """uint8 position nibbles -> uint8 numbers of pairs; a nibble that fills up a row becomes pair 0."""
    return _tables()[0][metadata.int()]


def to_metadata(numbers: torch.Tensor) -> torch.Tensor:
    """Inverse of `from_metadata` for nibbles that are pairs."""
    return _tables()[1][numbers.int()]


def mask(metadata: torch.Tensor, columns: int) -> torch.Tensor:
    """bool `[rows, columns]`: the kept places."""
    return _tables()[2][metadata.int()].flatten(1)[:, :columns].contiguous()


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every byte: pair numbers of its nibbles, positions of its pair numbers, kept places of its nibbles `[256, 8]`."""
    nibbles = [first | second << 2 for first, second in _PAIRS]
    number = [nibbles.index(n) if n in nibbles else 0 for n in range(16)]
    position = [nibbles[n] if n < len(nibbles) else 0 for n in range(16)]
    kept = [[place in ((n & 3), (n >> 2)) for place in range(4)] for n in range(16)]
    every = range(256)
    return (
        torch.tensor([number[b & 15] | number[b >> 4] << 4 for b in every], dtype=torch.uint8),
        torch.tensor([position[b & 15] | position[b >> 4] << 4 for b in every], dtype=torch.uint8),
        torch.tensor([kept[b & 15] + kept[b >> 4] for b in every]),
    )
