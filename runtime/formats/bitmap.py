"""`bitmap`: any pattern of zeros; one bit a position says kept or pruned, the kept values follow in row-major order.

A b-bit weight kept with density d takes `1 + d * b` bits (float: `1 + 16 * d` in bf16), plus 64 bits a row.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.errors import ArtifactError
from runtime.formats.base import SparseFormat
from runtime.formats.bitpack import gather_stream, pack_stream, stream_of_rows, unpack_bits
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
    counted = True

    def why_not_pattern(self, scheme: Scheme, shape: Shape) -> str | None:
        return "it stores sparse weights only" if scheme.sparsity is None else None

    def mask(self, tensors: Tensors, columns: int) -> torch.Tensor | None:
        bitmap = tensors.get(self.positions)
        return None if bitmap is None else unpack_bits(bitmap)[:, :columns].view(torch.bool)

    def stored_count(self, tensors: Tensors, where: str = "") -> int | None:
        offsets = tensors.get("weight_row_offsets")
        if offsets is None or offsets.dim() != 1 or not offsets.numel() or offsets.dtype != torch.int64:
            raise ArtifactError(f"tensor {join(where, 'weight_row_offsets')} is missing or not a list of int64")
        return int(offsets[-1])

    def select_code_rows(self, tensors: Tensors, scheme: Scheme, rows: torch.Tensor) -> Tensors:
        new, index = stream_of_rows(tensors["weight_row_offsets"], rows)
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

    def expected_count(self, scheme: Scheme, shape: Shape, density: float) -> int | None:
        return round(shape[0] * shape[1] * density)

    def validate_content(self, tensors: Tensors, shape: Shape, where: str) -> None:
        offsets, bits = tensors["weight_row_offsets"], unpack_bits(tensors["weight_bitmap"])
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
