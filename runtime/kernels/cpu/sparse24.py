"""2:4 weights as the C kernels read them: panels of 32 rows, `runtime/kernels/cpu/c/sparse.h`."""

from __future__ import annotations

from functools import cache

import torch

from runtime.formats.bitpack import row_slices, unpack_rows
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.formats.sparse24 import Sparse24
from runtime.kernels.base import Layer
from runtime.kernels.cpu.panels import PANEL, SLICE, Panels, to_panels, weight_of
from runtime.kernels.cpu.planes import from_stream, group_sums, pack_nibbles, unpack_nibbles

_ZEROS = -0x77777778  # 0x88888888: eight codes 0

# 2:4 positions: the nibbles `i0 | i1 << 2` of format `sparse24` as numbers of pairs (0 to 5), which is what kernels look up.
#
# Two quads a byte, the earlier one in the low nibble, both here and there.

_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # PAIR of sparse.h


def from_metadata(metadata: torch.Tensor) -> torch.Tensor:
    """uint8 position nibbles -> uint8 numbers of pairs; a nibble that fills up a row becomes pair 0."""
    return _tables()[0][metadata.int()]


def to_metadata(numbers: torch.Tensor) -> torch.Tensor:
    """Inverse of `from_metadata` for nibbles that are pairs."""
    return _tables()[1][numbers.int()]


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """For every byte: pair numbers of its nibbles, positions of its pair numbers."""
    nibbles = [first | second << 2 for first, second in _PAIRS]
    number = [nibbles.index(n) if n in nibbles else 0 for n in range(16)]
    position = [nibbles[n] if n < len(nibbles) else 0 for n in range(16)]
    every = range(256)
    return (
        torch.tensor([number[b & 15] | number[b >> 4] << 4 for b in every], dtype=torch.uint8),
        torch.tensor([position[b & 15] | position[b >> 4] << 4 for b in every], dtype=torch.uint8),
    )


class Pairs(Panels):
    """2:4: of each quad of columns two codes and the pair of places they have, 3 bits a weight."""

    name, bits, multiple = "panels-s24", (2, 4), 32
    formats = frozenset({"sparse24"})

    def kind(self, layer: Layer) -> str:
        return "s24"

    def why_not(self, layer: Layer) -> str | None:
        weights = layer.entry.scheme.grid
        if weights is not None and not weights.symmetric:
            return "it computes symmetric weights: a pruned weight is the code 0"
        return super().why_not(layer)

    def pack(self, tensors: Tensors, layer: Layer) -> Tensors:
        rows, columns = layer.shape
        layer.storage.validate(tensors, layer.entry.scheme, layer.shape, layer.dtype)
        group = self.group(layer)
        panels, groups = -(-rows // PANEL), -(-columns // group)
        wide = groups * group
        words = torch.empty(panels, wide // 32, 3, PANEL, dtype=torch.int32)
        sums = torch.empty(panels, groups, PANEL, dtype=torch.int16)
        for start, end in row_slices(panels, wide * PANEL, SLICE):
            height, part = (end - start) * PANEL, slice(start * PANEL, min(rows, end * PANEL))
            codes = torch.full((height, wide // 16), _ZEROS, dtype=torch.int32)
            read = self._kept(tensors["weight_packed"][part], layer.grid.bits, columns // 2)
            codes[: read.shape[0], : read.shape[1]] = read
            pair = torch.zeros(height, wide // 8, dtype=torch.uint8)
            places = from_metadata(tensors["weight_metadata"][part])
            pair[: places.shape[0], : places.shape[1]] = places
            words[start:end, :, :2] = codes.view(end - start, PANEL, wide // 32, 2).permute(0, 2, 3, 1)
            words[start:end, :, 2] = pair.view(torch.int32).view(end - start, PANEL, wide // 32).transpose(1, 2)
            sums[start:end] = group_sums(codes, groups).view(end - start, PANEL, groups).transpose(1, 2)
        out = {"weight": words.view(torch.uint8).view(panels, groups, -1), "sums": sums}
        return out | to_panels(tensors, layer)

    @staticmethod
    def _kept(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
        """Words of the kept codes, whatever their width, as nibbles."""
        if bits == 4:
            return from_stream(packed)
        codes = torch.full((packed.shape[0], -(-count // 8) * 8), 8, dtype=torch.int8)
        codes[:, :count] += unpack_rows(packed, bits, count)
        return pack_nibbles(codes)

    def unpack(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        rows, columns = layer.shape
        packed = tensors["weight"]
        panels = packed.shape[0]
        words = packed.view(panels, -1).view(torch.int32).view(panels, -1, 3, PANEL)
        # Copies: a single column of panels may count as contiguous and still refuse to be seen as bytes.
        whole = torch.contiguous_format
        kept = words[:, :, :2].permute(0, 3, 1, 2).clone(memory_format=whole).view(panels * PANEL, -1)
        halves = (unpack_nibbles(kept) - 8)[:rows, : columns // 2]
        pair = words[:, :, 2].transpose(1, 2).clone(memory_format=whole).view(panels * PANEL, -1).view(torch.uint8)
        metadata = to_metadata(pair[:rows, : -(-columns // 8)])
        values, mask = Sparse24().place(halves, {"weight_metadata": metadata}, layer.entry.scheme, layer.shape, None)
        return weight_of(values, mask, tensors, layer)


S24 = Pairs()
