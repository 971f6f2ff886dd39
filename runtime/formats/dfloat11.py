"""bfloat16 without loss: exponents in short codes of one width, others listed (after DFloat11, Zhang et al., 2025, arXiv 2504.11651).

Of the 16 bits of a trained weight the exponent has 8, which carry about 2.6 bits of entropy; sign and mantissa do not compress. The paper
uses Huffman codes, whose lengths differ, so that one must be read before the next is found. Here all codes of a matrix are equally
wide, and many are looked up at once: they number its most frequent exponents, and the last code is an escape: the exponent is in a list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runtime.errors import CompressError
from runtime.formats.bitpack import row_slices, stream_of_rows, unpack_bits
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec

#: Share of escapes among normally distributed weights by width of the codes; it depends on their scale (3 bits: 0.021 to 0.028).
_ESCAPES = {2: 0.26, 3: 0.025, 4: 0.00015}
_SLICE = 1 << 20  # weights at a time


@dataclass(frozen=True)
class DFloat11(Representation):
    """bfloat16 weights, bit for bit: every pattern comes back, subnormal numbers, minus zero, infinities and NaN too.

    Codes are the 16 bits of a weight, int16 `[out, in]`. The parameter `exponents` uint8 `[2^code_bits - 1]` has those with a code.
    On disk, with `n = code_bits`:

    - `weight_mantissas`: uint8 `[out, in]`, the mantissa in the upper 7 bits, the sign in the lowest;
    - `weight_codes`: uint8 `[out, n, ceil(in / 8)]`, bit planes of the codes, 32 bytes for every 256 columns: bit `i` of byte `j` is column
      `32 i + j` of these, so that shifts make codes of neighbours neighbours. The rest of a row has `w <= 32` bytes, and columns `w i + j`;
      beyond the last column bits are 0;
    - `weight_exponents`: uint8 `[2^n - 1]`, what code is which exponent; the code `2^n - 1` stands for any other;
    - `weight_escapes`: uint8 `[count]`, those others in row-major order;
    - `weight_row_offsets`: int64 `[out + 1]`, where in them each row begins.

    Attributes:
        code_bits: 2 to 4; in a recipe what a plan counts with, since every matrix gets the width that takes the fewest bytes.
    """

    name = "dfloat11"
    lossless = True
    counted = "weight_escapes"
    code_bits: int = 3

    def __post_init__(self) -> None:
        if self.code_bits not in _ESCAPES:
            raise ValueError(f"code_bits of dfloat11 is {self.code_bits}, expected 2, 3 or 4")

    @property
    def bits(self) -> float:  # type: ignore[override]
        """Bits of mantissa, sign and code, and of the exponents that normally distributed weights list."""
        return 8 + self.code_bits + 8 * _ESCAPES[self.code_bits]

    def why_not_dtype(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.bfloat16:
            return None
        return f"{self.name} stores bfloat16 weights, and the model's are {str(dtype).removeprefix('torch.')}"

    def describe(self) -> str:
        return self.name

    # ---------------------------------------------------------------- what codes are
    def for_weight(self, weight: torch.Tensor) -> DFloat11:
        counts = _histogram(_bits(weight)).sort(descending=True).values
        planes = weight.shape[0] * -(-weight.shape[1] // 8)

        def size(width: int) -> int:
            return width * planes + int(counts[2**width - 1 :].sum()) + 2**width

        return DFloat11(min(_ESCAPES, key=size))

    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """The most frequent exponents; of equally frequent ones the smallest."""
        order = _histogram(_bits(weight)).sort(descending=True, stable=True).indices
        return {"exponents": order[: 2**self.code_bits - 1].to(torch.uint8)}

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return columns, _bits(columns)[0]

    def round(self, weight: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        return _bits(weight)

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return codes.view(torch.bfloat16).to(dtype)

    # ---------------------------------------------------------------- on disk
    def expected_count(self, shape: Shape) -> int:
        return round(_ESCAPES[self.code_bits] * shape[0] * shape[1])

    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return self.tensors_for_count(shape, dtype, self.expected_count(shape))

    def tensors_for_count(self, shape: Shape, dtype: torch.dtype, count: int) -> dict[str, TensorSpec]:
        rows, columns = shape
        return {
            "weight_mantissas": TensorSpec(shape, torch.uint8),
            "weight_codes": TensorSpec((rows, self.code_bits, -(-columns // 8)), torch.uint8),
            "weight_exponents": TensorSpec((2**self.code_bits - 1,), torch.uint8),
            "weight_escapes": TensorSpec((count,), torch.uint8),
            "weight_row_offsets": TensorSpec((rows + 1,), torch.int64),
        }

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        """The tensors, on the CPU."""
        bits, (rows, columns) = codes.cpu().contiguous().numpy().view(np.uint16), codes.shape
        exponents, last = parameters["exponents"].cpu(), 2**self.code_bits - 1
        code_of = np.full(256, last, np.uint8)
        code_of[exponents.numpy()] = np.arange(last)
        mantissas = np.empty((rows, columns), np.uint8)
        planes = np.empty((rows, self.code_bits, -(-columns // 8)), np.uint8)
        offsets = np.zeros(rows + 1, np.int64)
        listed = [np.empty(0, np.uint8)]
        for start, stop in row_slices(rows, columns, _SLICE):
            part = bits[start:stop]
            mantissas[start:stop] = part << 1 | part >> 15
            exponent = (part >> 7).astype(np.uint8)
            code = code_of[exponent]
            for bit in range(self.code_bits):
                planes[start:stop, bit] = _pack(code >> bit & 1)
            others = code == last
            offsets[start + 1 : stop + 1] = others.sum(1)
            listed.append(exponent[others])
        return {
            "weight_mantissas": torch.from_numpy(mantissas),
            "weight_codes": torch.from_numpy(planes),
            "weight_exponents": exponents,
            "weight_escapes": torch.from_numpy(np.concatenate(listed)),
            "weight_row_offsets": torch.from_numpy(offsets.cumsum()),
        }

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        mantissas, planes, offsets = (tensors[f"weight_{n}"] for n in ("mantissas", "codes", "row_offsets"))
        last = 2**self.code_bits - 1
        table = torch.nn.functional.pad(tensors["weight_exponents"], (0, 1))
        codes = torch.empty(shape, dtype=torch.int16, device=mantissas.device)
        slices = list(row_slices(*shape, _SLICE))
        ends = offsets[[0, *(stop for _, stop in slices)]].tolist()  # one wait for the device
        for (start, stop), first, end in zip(slices, ends, ends[1:], strict=False):
            code = unpack_bits(planes[start:stop, 0])
            for bit in range(1, self.code_bits):
                code |= unpack_bits(planes[start:stop, bit]) << bit
            code = _in_order(code)[:, : shape[1]]
            exponent = table.index_select(0, code.flatten().int()).view(code.shape)
            exponent.masked_scatter_(code == last, tensors["weight_escapes"][first:end])
            turned = exponent.to(torch.int16) << 8 | mantissas[start:stop].to(torch.int16)
            codes[start:stop] = turned >> 1 & 0x7FFF | turned << 15
        return codes, {"exponents": tensors["weight_exponents"]}

    def select_rows(self, tensors: Tensors, shape: Shape, rows: torch.Tensor) -> Tensors:
        offsets, index = stream_of_rows(tensors["weight_row_offsets"], rows)
        return {
            "weight_mantissas": tensors["weight_mantissas"][rows],
            "weight_codes": tensors["weight_codes"][rows],
            "weight_exponents": tensors["weight_exponents"],
            "weight_escapes": tensors["weight_escapes"][index],
            "weight_row_offsets": offsets,
        }

    def find_corruption(self, tensors: Tensors, shape: Shape) -> tuple[str, str] | None:
        planes, offsets, escapes = (tensors[f"weight_{n}"] for n in ("codes", "row_offsets", "escapes"))
        exponents = tensors["weight_exponents"].long()
        if len(exponents.unique()) < len(exponents):
            return "weight_exponents", "has duplicate exponents"
        counts = torch.zeros(shape[0], dtype=torch.int64, device=planes.device)
        for start, stop in row_slices(*shape, _SLICE):
            others = some = planes[start:stop, 0]
            for bit in range(1, self.code_bits):
                others, some = others & planes[start:stop, bit], some | planes[start:stop, bit]
            if shape[1] % 8 and bool(_in_order(unpack_bits(some))[:, shape[1] :].any()):
                return "weight_codes", "has codes beyond the last column"
            counts[start:stop] = unpack_bits(others).sum(1)
        whole = int(offsets[0]) == 0 and int(offsets[-1]) == len(escapes)
        if not whole or not torch.equal(offsets.diff(), counts):
            return "weight_row_offsets", "does not agree with the codes beside it"
        coded = torch.zeros(256, dtype=torch.bool, device=planes.device)
        coded[exponents] = True
        if bool(coded[escapes.int()].any()):
            return "weight_escapes", "lists an exponent that has a code"
        return None


def _pack(bits: np.ndarray) -> np.ndarray:
    """A plane `[rows, ceil(columns / 8)]` of bits `[rows, columns]`, a byte each."""
    rows, columns = bits.shape
    whole, width = columns // 256 * 256, -(-(columns % 256) // 8)
    rest = np.pad(bits[:, whole:], ((0, 0), (0, 8 * width - columns % 256)))
    parts = (bits[:, :whole].reshape(rows, -1, 8, 32), rest.reshape(rows, -1, 8, max(1, width)))
    return np.concatenate([np.packbits(part, axis=2, bitorder="little").reshape(rows, -1) for part in parts], axis=1)


def _in_order(bits: torch.Tensor) -> torch.Tensor:
    """Bits `[rows, 8 n]` of a plane, or codes in their order, as columns are."""
    whole = bits.shape[1] // 256 * 256
    parts = (bits[:, :whole].unflatten(1, (-1, 32, 8)), bits[:, whole:].unflatten(1, (1, -1, 8)))
    return torch.cat([part.transpose(2, 3).flatten(1) for part in parts], dim=1)


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of weights (float32 or bfloat16), int16; CompressError where others are not zero."""
    if weight.dtype == torch.bfloat16:
        return weight.contiguous().view(torch.int16)
    found = torch.empty(weight.shape, dtype=torch.int16, device=weight.device)
    for start, stop in row_slices(weight.shape[0], weight.shape[1], _SLICE):
        words = weight[start:stop].float().view(torch.int32)
        if bool((words & 0xFFFF).any()):
            raise CompressError("dfloat11 stores what bfloat16 holds exactly, and was given other weights")
        found[start:stop] = (words >> 16).to(torch.int16)
    return found


def _histogram(bits: torch.Tensor) -> torch.Tensor:
    """How often each exponent is there, int64 `[256]`."""
    counts = torch.zeros(256, dtype=torch.int64, device=bits.device)
    for start, stop in row_slices(bits.shape[0], bits.shape[1], _SLICE):
        counts += torch.bincount((bits[start:stop].int() >> 7 & 0xFF).flatten(), minlength=256)
    return counts
