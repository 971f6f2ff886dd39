"""`sparse24`: at most two non-zeros in every four consecutive columns; two values and four bits of position a quad.

With 4-bit codes and groups of 128 that is 2 + 1 + 0.125 = 3.125 bits a weight, scales included. The position nibble is
`i0 | i1 << 2` with `i0 < i1`, the layout sparse matrix units read ("Accelerating Sparse Deep Neural Networks", arXiv
2104.08378).
"""

from __future__ import annotations

import re

import torch

from runtime.errors import ArtifactError, CompressError
from runtime.formats.base import SparseFormat
from runtime.formats.bitpack import row_slices
from runtime.formats.checks import join, kept
from runtime.formats.cut import ROWS, Along
from runtime.formats.float8 import indexable
from runtime.formats.representation import Shape, Tensors, TensorSpec
from runtime.formats.scheme import CompressedWeight, Scheme

_SLICE = 1 << 18  # weights handled at once


def _positions() -> torch.Tensor:
    """Position nibble for each of the 16 sets of kept columns; 255 where more than two are kept."""
    table = []
    for bits in range(16):
        chosen = [i for i in range(4) if bits >> i & 1]
        if len(chosen) > 2:
            table.append(255)
            continue
        spare = [i for i in range(4) if i not in chosen]
        first, second = sorted(chosen + spare[: 2 - len(chosen)])
        table.append(first | second << 2)
    return torch.tensor(table, dtype=torch.uint8)


_NIBBLE = _positions()


class Sparse24(SparseFormat):
    """`weight_metadata` uint8 `[out, ceil(in / 8)]` (two quads a byte, the earlier one in the low nibble),
    `weight_shape`, and the two values of each quad in column order: `weight_packed` int32 `[out, ceil(in / 2 * bits /
    32)]` for integer codes, `weight_values` `[out, in / 2]` for floats. A quad with fewer than two non-zeros keeps
    zeros explicitly, so the mask that `unpack` returns may have more True than the one that was packed; the matrix is
    the same.
    """

    name = "sparse24"
    positions = "weight_metadata"
    columns_per_value = 2

    def why_not_pattern(self, scheme: Scheme, shape: Shape) -> str | None:
        match = re.fullmatch(r"(\d+):(\d+)", scheme.sparsity or "")
        if match is None or (int(match[1]), int(match[2])) not in ((2, 4), (1, 4), (1, 2)):
            return "it stores 2:4 sparsity (1:2 and 1:4 are cases of it)"
        if shape[1] % 4:
            return f"2:4 needs rows of a multiple of 4 weights, not {shape[1]}"
        return None

    def mask(self, tensors: Tensors, columns: int) -> torch.Tensor | None:
        metadata = tensors.get(self.positions)
        if metadata is None:
            return None
        nibbles = position_nibbles(metadata, columns).unsqueeze(-1)
        place = torch.arange(4, dtype=torch.uint8, device=metadata.device)
        return ((nibbles & 3 == place) | (nibbles >> 2 == place)).flatten(1)

    def position_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        return {"weight_metadata": TensorSpec((shape[0], -(-shape[1] // 8)), torch.uint8, (ROWS, Along(1, 8)))}

    def value_shape(self, shape: Shape, count: int | None) -> tuple[int, ...]:
        return shape[0], shape[1] // 2

    def split(self, weight: CompressedWeight) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.values.shape
        mask = kept(weight)
        nibbles = torch.empty(rows, columns // 4, dtype=torch.uint8)
        halves = torch.empty(rows, columns // 2, dtype=weight.values.dtype)
        powers = torch.tensor([1, 2, 4, 8], dtype=torch.uint8)
        for start, stop in row_slices(rows, columns, _SLICE):
            quads = (mask[start:stop].view(-1, columns // 4, 4).to(torch.uint8) * powers).sum(-1)
            nibbles[start:stop] = _NIBBLE[quads]
            index = _columns(nibbles[start:stop])
            halves[start:stop] = indexable(weight.values[start:stop]).gather(1, index).view(weight.values.dtype)
        if bool((nibbles == 255).any()):
            raise CompressError("weight has more than two non-zeros in a quad, so it is not 2:4 sparse")
        return {"weight_metadata": position_bytes(nibbles)}, halves

    def validate_content(self, tensors: Tensors, shape: Shape, where: str) -> None:
        for start, stop in row_slices(*shape, _SLICE):
            nibbles = position_nibbles(tensors["weight_metadata"][start:stop], shape[1])
            if bool(((nibbles & 3) >= (nibbles >> 2)).any()):
                raise ArtifactError(f"tensor {join(where, 'weight_metadata')} holds positions that are not 2:4 pairs")

    def place(
        self, stored: torch.Tensor, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (rows, columns), metadata = shape, tensors["weight_metadata"]
        values = self.pruned(stored, scheme, shape, zero)
        for start, stop in row_slices(rows, columns, _SLICE):
            index = _columns(position_nibbles(metadata[start:stop], columns))
            indexable(values[start:stop]).scatter_(1, index, indexable(stored[start:stop]))
        return values, self.mask(tensors, columns)


def position_nibbles(metadata: torch.Tensor, columns: int) -> torch.Tensor:
    """Position nibbles `[rows, columns / 4]` out of their bytes."""
    return torch.stack([metadata & 15, metadata >> 4], dim=-1).flatten(1)[:, : columns // 4]


def position_bytes(nibbles: torch.Tensor) -> torch.Tensor:
    """Inverse of `position_nibbles`: two in a byte; what fills up a row is 0."""
    nibbles = torch.nn.functional.pad(nibbles, (0, nibbles.shape[1] % 2))
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def _columns(nibbles: torch.Tensor) -> torch.Tensor:
    """Column numbers int64 `[rows, in / 2]` of the values that position nibbles `[rows, in / 4]` name."""
    first = torch.arange(nibbles.shape[1], device=nibbles.device) * 4
    pair = torch.stack([first + (nibbles & 3), first + (nibbles >> 2 & 3)], dim=-1)
    return pair.view(nibbles.shape[0], -1)
