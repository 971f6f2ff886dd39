"""Words of panels: codes of 2 to 8 bits as `runtime/kernels/cpu/c/planes.h` takes them apart, there and back."""

from __future__ import annotations

import torch

# Words of eight nibbles, in the order the C kernels take them apart: the first four are the low nibbles of bytes 0 to 3, the other four
# the high ones.

_LOW = 0x0F0F0F0F


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """int8 0..15 `[..., columns]`, contiguous, columns a multiple of 8 -> int32 `[..., columns / 8]`."""
    fours = values.view(torch.int32)
    return fours[..., 0::2] | fours[..., 1::2] << 4


def unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`."""
    fours = torch.empty(*words.shape, 2, dtype=torch.int32)
    torch.bitwise_and(words, _LOW, out=fours[..., 0])
    torch.bitwise_and(words >> 4, _LOW, out=fours[..., 1])
    return fours.view(*words.shape[:-1], -1).view(torch.int8)


def from_stream(packed: torch.Tensor) -> torch.Tensor:
    """Rows of `bitpack.pack_rows` of 4 bits -> int32 `[rows, words]` of nibbles; what fills up the last word is any code."""
    # Eight nibbles in order: swap the middle bytes, then the middle nibbles of each half.
    words = packed.clone(memory_format=torch.contiguous_format)
    for distance, where in ((8, 0x0000FF00), (4, 0x00F000F0)):
        swapped = (words >> distance).bitwise_xor_(words).bitwise_and_(where)
        words.bitwise_xor_(swapped).bitwise_xor_(swapped << distance)
    return words


def words_of(packed: torch.Tensor) -> torch.Tensor:
    """Stored rows of 4-bit codes, int32 or uint8, as int32 `[rows, words]`; a copy where a word would straddle two."""
    packed = packed.contiguous()
    if packed.storage_offset() * packed.element_size() % 4 or packed.data_ptr() % 4:
        packed = packed.clone()
    return packed.view(torch.int32)


# Planes: a code is cut into 4, 2 and 1 bits, those that its width is the sum of, low bits first; 8 bits stay whole. The words of 32
# columns are those of the planes one after the other (`planes.h`).


def pack_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes without a sign, int8 `[..., 32]` or `[..., 16]`, contiguous -> int32 `[..., words]`."""
    if bits == 8:
        return codes.view(torch.int32)
    parts, place = [], 0
    for width in (width for width in (4, 2, 1) if bits & width):
        words = pack_nibbles(codes >> place & (1 << width) - 1)
        together = 4 // width  # words whose nibbles leave room for each other
        words = torch.nn.functional.pad(words, (0, -words.shape[-1] % together)).unflatten(-1, (-1, together))
        parts.append((words << torch.arange(0, 4, width, dtype=torch.int32)).sum(-1, dtype=torch.int32))
        place += width
    return torch.cat(parts, -1)


def unpack_planes(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Inverse of `pack_planes` for so many columns."""
    if bits == 8:
        return words.contiguous().view(torch.int8)
    codes, place, at = torch.zeros(*words.shape[:-1], columns, dtype=torch.int8), 0, 0
    for width in (width for width in (4, 2, 1) if bits & width):
        count = -(-columns * width // 32)
        apart = words[..., at : at + count, None] >> torch.arange(0, 4, width, dtype=torch.int32)
        codes |= (unpack_nibbles(apart.flatten(-2)[..., : columns // 8].contiguous()) & (1 << width) - 1) << place
        place, at = place + width, at + count
    return codes


def group_sums(words: torch.Tensor, groups: int) -> torch.Tensor:
    """int32 `[rows, words]` -> int16 `[rows, groups]`: the sum of the codes of each group of words."""
    both = (words & _LOW).add_((words >> 4).bitwise_and_(_LOW)).view(torch.uint8)
    parts = both.view(words.shape[0], groups, -1)
    return (parts.sum(-1, dtype=torch.int32) - 16 * parts.shape[-1]).to(torch.int16)
