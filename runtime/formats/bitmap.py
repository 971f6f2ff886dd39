"""`bitmap`: any pattern of zeros; one bit a position says kept or pruned, the kept values follow in row-major order.

A b-bit weight kept with density d takes `1 + d * b` bits (float: `1 + 16 * d` in bf16), plus 64 bits a row.
"""

from __future__ import annotations

import torch

from runtime.errors import ArtifactError
from runtime.formats.base import GridFormat
from runtime.formats.bitpack import gather_stream, pack_stream, packed_words, unpack_stream
from runtime.formats.checks import expand_groups, join, kept, why_not_weights
from runtime.formats.float8 import FLOAT8
from runtime.formats.representation import Shape, Tensors, TensorSpec
from runtime.formats.scheme import CompressedWeight, Scheme


class Bitmap(GridFormat):
    """`weight_bitmap` uint8 `[out, ceil(in / 8)]` (bit `i` of byte `j` is column `8j + i`), `weight_row_offsets`
    int64 `[out + 1]` (where each row's values start), `weight_shape`, and the `count` kept values: `weight_packed`
    int32 `[ceil(count * bits / 32)]` (one bit stream) or `weight_values` `[count]` for floats. Scales stay per group
    of original columns.
    """

    name = "bitmap"
    positions = "weight_bitmap"

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason = why_not_weights(scheme, shape)
        if reason is not None:
            return reason
        if scheme.sparsity is None:
            return "it stores sparse weights only"
        if scheme.activations is not None:
            return "weights with quantized activations are stored dense"
        return None

    def mask(self, tensors: Tensors, columns: int) -> torch.Tensor | None:
        bitmap = tensors.get(self.positions)
        return None if bitmap is None else _bits(bitmap)[:, :columns].view(torch.bool)

    def count(self, weight: CompressedWeight) -> int | None:
        return int(kept(weight).sum())

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
            picked = values.view(torch.uint8)[index].view(FLOAT8) if values.dtype == FLOAT8 else values[index]
            out["weight_values"] = picked
        return out

    def code_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        if count is None or not 0 <= count <= shape[0] * shape[1]:
            raise ArtifactError(
                f"format bitmap needs the number of stored values of a weight {list(shape)}, got {count}"
            )
        specs = {
            "weight_bitmap": TensorSpec((shape[0], -(-shape[1] // 8)), torch.uint8),
            "weight_row_offsets": TensorSpec((shape[0] + 1,), torch.int64),
            "weight_shape": TensorSpec((2,), torch.int64),
        }
        if scheme.grid is not None and scheme.grid.type == "int":
            specs["weight_packed"] = TensorSpec((packed_words(count, scheme.grid.bits),), torch.int32)
        else:
            specs["weight_values"] = TensorSpec((count,), dtype if scheme.weights is None else FLOAT8)
        return specs

    def pack_codes(self, weight: CompressedWeight) -> Tensors:
        mask, scheme = kept(weight), weight.scheme.grid
        rows, columns = mask.shape
        padded = torch.nn.functional.pad(mask, (0, -columns % 8)).view(rows, -1, 8).to(torch.uint8)
        bitmap = torch.zeros(padded.shape[:2], dtype=torch.uint8)
        for i in range(8):
            bitmap |= padded[..., i] << i
        offsets = torch.zeros(rows + 1, dtype=torch.int64)
        torch.cumsum(mask.sum(1), 0, out=offsets[1:])
        out = {
            "weight_bitmap": bitmap,
            "weight_row_offsets": offsets,
            "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
        }
        values = (
            weight.values.view(torch.uint8)[mask].view(FLOAT8) if weight.values.dtype == FLOAT8 else weight.values[mask]
        )
        if scheme is not None and scheme.type == "int":
            out["weight_packed"] = pack_stream(values, scheme.bits)
        else:
            out["weight_values"] = values
        return out

    def validate_content(self, tensors: Tensors, shape: Shape, where: str) -> None:
        offsets, bits = tensors["weight_row_offsets"], _bits(tensors["weight_bitmap"])
        beyond = bits[:, shape[1] :]
        if int(offsets[0]) != 0 or not torch.equal(offsets.diff(), bits.sum(1)) or bool(beyond.any()):
            raise ArtifactError(f"tensor {join(where, 'weight_bitmap')} does not agree with the row offsets beside it")

    def unpack_codes(
        self, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        offsets = tensors["weight_row_offsets"]
        mask = self.mask(tensors, shape[1])
        assert mask is not None
        if "weight_packed" in tensors:
            assert scheme.grid is not None
            stored = unpack_stream(tensors["weight_packed"], scheme.grid.bits, int(offsets[-1]))
        else:
            stored = tensors["weight_values"]
        if stored.dtype == FLOAT8:
            values = torch.zeros(shape, dtype=torch.uint8, device=stored.device)
            return values.masked_scatter_(mask, stored.view(torch.uint8)).view(FLOAT8), mask
        values = torch.zeros(shape, dtype=stored.dtype, device=stored.device)
        if zero is not None:
            values.copy_(expand_groups(zero, scheme.grid, shape[1]).expand(shape))
        return values.masked_scatter_(mask, stored), mask


def _bits(bitmap: torch.Tensor) -> torch.Tensor:
    """One byte, 0 or 1, for each bit, low bits first: eight at a time out of a table of 256."""
    every = torch.arange(256, device=bitmap.device)
    table = torch.stack([every >> i & 1 for i in range(8)], dim=-1).to(torch.uint8).view(torch.int64).view(-1)
    chosen = table.index_select(0, bitmap.reshape(-1).to(torch.int32))
    return chosen.view(bitmap.shape[0], bitmap.shape[1], 1).view(torch.uint8).flatten(1)
