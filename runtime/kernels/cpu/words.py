"""Words of eight 4-bit codes, in the order the C kernels take them apart: codes 0 to 3 are the low nibbles of bytes 0 to 3, codes
4 to 7 the high ones. Codes are stored as code + 8.
"""

from __future__ import annotations

import torch

from runtime.formats.bitpack import unpack_rows

_LOW = 0x0F0F0F0F


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes -8..7 `[rows, columns]`, columns a multiple of 8 -> int32 `[rows, columns / 8]`."""
    fours = (codes + 8).view(torch.int32)
    return fours[:, 0::2] | fours[:, 1::2] << 4


def unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`."""
    fours = torch.empty(words.shape[0], words.shape[1], 2, dtype=torch.int32)
    torch.bitwise_and(words, _LOW, out=fours[..., 0])
    torch.bitwise_and(words >> 4, _LOW, out=fours[..., 1])
    return fours.view(words.shape[0], -1).view(torch.int8).sub_(8)


def from_stream(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Rows of `bitpack.pack_rows` (2 to 4 bits) -> int32 `[rows, ceil(columns / 8)]`; what fills up the last word is any code."""
    if bits != 4:
        codes = torch.zeros(packed.shape[0], -(-columns // 8) * 8, dtype=torch.int8)
        codes[:, :columns] = unpack_rows(packed, bits, columns)
        return pack_nibbles(codes)
    # Eight nibbles in order: swap the middle bytes, then the middle nibbles of each half.
    words = packed.clone(memory_format=torch.contiguous_format)
    for distance, where in ((8, 0x0000FF00), (4, 0x00F000F0)):
        swapped = (words >> distance).bitwise_xor_(words).bitwise_and_(where)
        words.bitwise_xor_(swapped).bitwise_xor_(swapped << distance)
    return words


def sums(words: torch.Tensor, groups: int) -> torch.Tensor:
    """int32 `[rows, words]` -> int16 `[rows, groups]`: the sum of the codes of each group of words."""
    both = (words & _LOW).add_((words >> 4).bitwise_and_(_LOW)).view(torch.uint8)
    parts = both.view(words.shape[0], groups, -1)
    return (parts.sum(-1, dtype=torch.int32) - 16 * parts.shape[-1]).to(torch.int16)
