"""`bitmap`: any pattern of zeros; one bit a position says kept or pruned, the kept values follow in row-major order.

A b-bit weight kept with density d takes `1 + d * b` bits (float: `1 + 16 * d` in bf16), plus 64 bits a row.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.errors import ArtifactError
from runtime.formats.base import SparseFormat
from runtime.formats.bitpack import gather_stream, pack_stream
from runtime.formats.checks import join, kept
from runtime.formats.float8 import indexable
from runtime.formats.representation import Shape, Tensors, TensorSpec
from runtime.formats.scheme import CompressedWeight, Scheme


class Bitmap(SparseFormat):
    """`weight_bitmap` uint8 `[out, ceil(in / 8)]` (bit `i` of byte `j` is column `8j + i`), `weight_row_offsets`
    int64 `[out + 1]` (where each row's values start), `weight_shape`, and the `count` kept values: `weight_packed`
    int32 `[ceil(count * bits / 32)]` (one bit stream) or `weight_values` `[count]` for floats. Scales stay per group
    of original columns.
    """

    name = "bitmap"
    positions = "weight_bitmap"

    def why_not_pattern(self, scheme: Scheme, shape: Shape) -> str | None:
        return "it stores sparse weights only" if scheme.sparsity is None else None

    def mask(self, tensors: Tensors, columns: int) -> torch.Tensor | None:
        bitmap = tensors.get(self.positions)
        return None if bitmap is None else _bits(bitmap)[:, :columns].view(torch.bool)

    def stored_count(self, tensors: Tensors, where: str = "") -> int | None:
        offsets = tensors.get("weight_row_offsets")
        if offsets is None or offsets.dim() != 1 or not offsets.numel() or offsets.dtype != torch.int64:
            raise ArtifactError(f"tensor {join(where, 'weight_row_offsets')} is missing or not a list of int64")
        return int(offsets[-1])

    def select_code_rows(self, tensors: Tensors, scheme: Scheme, rows: torch.Tensor) -> Tensors:
        offsets = tensors["weight_row_offsets"]
        lengths = offsets.diff()[rows]
        ends = lengths.cumsum(0)
        new = torch.nn.functional.pad(ends, (1, 0))
        # Position in the stored stream of every value of the selected rows.
        index = torch.arange(int(new[-1]), device=rows.device)
        index += torch.repeat_interleave(offsets[rows] - new[:-1], lengths)
        out = {"weight_bitmap": tensors["weight_bitmap"][rows], "weight_row_offsets": new}
        if "weight_packed" in tensors:
            assert scheme.grid is not None
            bits = scheme.grid.bits
            out["weight_packed"] = pack_stream(gather_stream(tensors["weight_packed"], bits, index), bits)
        else:
            values = tensors["weight_values"]
            out["weight_values"] = indexable(values)[index].view(values.dtype)
        return out

    def position_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        return {
            "weight_bitmap": TensorSpec((shape[0], -(-shape[1] // 8)), torch.uint8),
            "weight_row_offsets": TensorSpec((shape[0] + 1,), torch.int64),
        }

    def value_shape(self, shape: Shape, count: int | None) -> tuple[int, ...]:
        if count is None or not 0 <= count <= shape[0] * shape[1]:
            raise ArtifactError(
                f"format bitmap needs the number of stored values of a weight {list(shape)}, got {count}"
            )
        return (count,)

    def split(self, weight: CompressedWeight) -> tuple[Tensors, torch.Tensor]:
        mask = kept(weight)
        bitmap = torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))
        offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        values = indexable(weight.values)[mask].view(weight.values.dtype)
        return {"weight_bitmap": bitmap, "weight_row_offsets": offsets}, values

    def validate_content(self, tensors: Tensors, shape: Shape, where: str) -> None:
        offsets, bits = tensors["weight_row_offsets"], _bits(tensors["weight_bitmap"])
        beyond = bits[:, shape[1] :]
        if int(offsets[0]) != 0 or not torch.equal(offsets.diff(), bits.sum(1)) or bool(beyond.any()):
            raise ArtifactError(f"tensor {join(where, 'weight_bitmap')} does not agree with the row offsets beside it")

    def place(
        self, stored: torch.Tensor, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = self.mask(tensors, shape[1])
        assert mask is not None
        values = self.pruned(stored, scheme, shape, zero)
        indexable(values).masked_scatter_(mask, indexable(stored))
        return values, mask


def _bits(bitmap: torch.Tensor) -> torch.Tensor:
    """One byte, 0 or 1, for each bit, low bits first: eight at a time out of a table of 256."""
    every = torch.arange(256, device=bitmap.device)
    table = torch.stack([every >> i & 1 for i in range(8)], dim=-1).to(torch.uint8).view(torch.int64).view(-1)
    chosen = table.index_select(0, bitmap.reshape(-1).to(torch.int32))
    return chosen.view(bitmap.shape[0], bitmap.shape[1], 1).view(torch.uint8).flatten(1)
