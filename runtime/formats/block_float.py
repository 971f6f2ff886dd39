"""Block floats: 4- or 8-bit floating-point weights with a scale for every block of a row, itself a power of two or a float8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from runtime.errors import CompressError
from runtime.formats.bitpack import row_slices
from runtime.formats.cut import COLUMNS, ROWS, Along
from runtime.formats.float8 import FLOAT8, FLOAT8_MAXIMUM, indexable, round_float8, widen
from runtime.formats.grid import GridScheme, Rounding
from runtime.formats.representation import Shape, Tensors, TensorSpec

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Of e2m1 by its lower three bits, in halves."""
HALVES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.int8, device="cpu")
"""Of e2m1 by all four; minus zero is 0."""
_SLICE = 1 << 18  # codes that are packed at once
_SCALE_DTYPES = {"e8m0": torch.uint8, "e4m3": FLOAT8}


@dataclass(frozen=True)
class BlockFloat(GridScheme):
    """Floats of a few bits that share a scale: MXFP4 and MXFP8 (OCP Microscaling 1.0, 2023, arXiv 2310.10537), NVFP4 (NVIDIA, 2025).

    `bits` 4: e2m1, so 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; codes are int8, in halves. `bits` 8: e4m3, codes are float8.
    Parameters, as stored: `scale` `[out, in / group_size]`, and for `scales == "e4m3"` `global_scale` float32 `[1]`. `scales`:

    - `e8m0`: a power of two, uint8, the exponent plus 127;
    - `e4m3`: float8, to be divided by `global_scale`.

    Attributes:
        global_scale: of the matrices that the grid is for (`with_global_scale`), None before; no part of the scheme.
    """

    name = "block_float"
    type: Literal["int", "float"] = "float"
    group_size: int | None = 32
    scales: Literal["e8m0", "e4m3"] = "e8m0"
    global_scale: float | None = field(default=None, compare=False, repr=False)

    def why_not(self, shape: Shape) -> str | None:
        if self.type != "float" or not self.symmetric or self.strategy != "group":
            return f"block floats are symmetric and in groups, not {self.type}, {self.strategy}, symmetric={self.symmetric}"
        if (self.bits, self.scales, self.group_size) not in ((4, "e8m0", 32), (8, "e8m0", 32), (4, "e4m3", 16)):
            return (
                "block floats have 4 or 8 bits and groups of 32 with e8m0 scales, or 4 bits and groups of 16 with e4m3 scales, not "
                f"{self.bits} bits and groups of {self.group_size} with {self.scales}"
            )
        if shape[1] % self.width(shape[1]):
            return f"rows of {shape[1]} weights are not whole groups of {self.group_size}"
        return None

    def describe(self) -> str:
        return f"{'nv' if self.scales == 'e4m3' else 'mx'}fp{self.bits}"

    @property
    def integral(self) -> bool:
        return self.bits == 4

    @property
    def e2m1(self) -> bool:
        """Whether codes are e2m1, in halves."""
        return self.bits == 4

    @property
    def rounding(self) -> Rounding:
        return Rounding.E2M1 if self.e2m1 else Rounding.INTEGER

    @property
    def code_range(self) -> tuple[int, int]:
        return -_MAGNITUDES[-1], _MAGNITUDES[-1]

    def round_(self, steps: torch.Tensor) -> torch.Tensor:
        return round_e2m1_(steps)

    # ---------------------------------------------------------------- scales: a step is what one code counts
    def with_global_scale(self, weights: Sequence[torch.Tensor]) -> GridScheme:
        if self.scales != "e4m3" or self.global_scale is not None:
            return self
        extremes = [w.detach().aminmax() for w in weights if w.numel()]
        largest = max((max(-float(low), float(high)) for low, high in extremes), default=0.0)
        # The largest of all values may become 4 at the largest scale: then even its block has both choices, 4 and 6.
        found = torch.tensor(FLOAT8_MAXIMUM * 4 / largest if largest > 0 else 1.0, dtype=torch.float32)
        return replace(self, global_scale=float(found.clamp(2.0**-126, torch.finfo(torch.float32).max).nan_to_num(1.0)))

    def covering_scale(self, extreme: torch.Tensor) -> torch.Tensor:
        steps = super().covering_scale(extreme)
        return steps.log2().ceil().exp2() if self.scales == "e8m0" else steps

    def storable(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        parameters = self.parameters_of(torch.where(scale == 0, 1.0, scale.abs()), None, dtype)
        return self.steps(parameters)

    def parameters_of(self, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> Tensors:
        block_scale = scale * 2 if self.e2m1 else scale
        if self.scales == "e8m0":
            exponent = block_scale.log2().round_().clamp_(-125, 127)  # a step, half of it, is a normal float32
            return {"scale": (exponent + 127).to(torch.uint8)}
        if self.global_scale is None:
            raise CompressError("block floats with e4m3 scales need a global scale, and none is set")
        of_block = round_float8(block_scale * self.global_scale).clamp_min_(2.0**-9).to(FLOAT8)
        common = torch.full((1,), self.global_scale, dtype=torch.float32, device=scale.device)
        return {"scale": of_block, "global_scale": common}

    def steps(self, parameters: Tensors) -> torch.Tensor:
        """Stored scales as float32 steps, `[out, groups]`."""
        scale = parameters["scale"]
        if self.scales == "e8m0":
            block_scale = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.to(torch.int32) - 127)
        else:
            block_scale = widen(scale, torch.float32) / parameters["global_scale"]
        return block_scale / 2 if self.e2m1 else block_scale

    # ---------------------------------------------------------------- the calls of a representation
    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Scales that cover every block; `importance` has no say (methods search better ones)."""
        own = self.with_global_scale([weight])
        extreme = weight.view(weight.shape[0], -1, self.width(weight.shape[1])).abs().amax(-1)
        return own.parameters_of(own.storable(own.covering_scale(extreme), dtype), None, dtype)

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().nearest(columns, {"scale": self.steps(parameters)}, first)

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """`codes * steps`, computed in float32 as compressed-tensors does, or in `dtype` where that is wider."""
        return super().dequantize(codes, {"scale": self.steps(parameters)}, dtype)

    def rows(self, parameters: Tensors, index: torch.Tensor | slice) -> Tensors:
        return {
            name: p if name == "global_scale" else indexable(p)[index].view(p.dtype) for name, p in parameters.items()
        }

    def join_rows(self, parts: Sequence[Tensors]) -> Tensors:
        joined = {"scale": torch.cat([part["scale"] for part in parts])}
        return {name: joined.get(name, parameter) for name, parameter in parts[0].items()}

    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        packed = TensorSpec((shape[0], shape[1] // 2), torch.uint8, (ROWS, Along(1, 2)))
        specs = {"weight_packed": packed} if self.e2m1 else {"weight": TensorSpec(shape, FLOAT8, (ROWS, COLUMNS))}
        specs["weight_scale"] = TensorSpec(self.parameter_shape(shape), _SCALE_DTYPES[self.scales], self.parameter_axes)
        return specs | (
            {"weight_global_scale": TensorSpec((1,), torch.float32, (None,))} if self.scales == "e4m3" else {}
        )

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        weight = {"weight_packed": pack_e2m1(codes)} if self.e2m1 else {"weight": codes}
        return weight | {f"weight_{name}": tensor for name, tensor in parameters.items()}

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        names = ("scale", "global_scale") if self.scales == "e4m3" else ("scale",)
        codes = unpack_e2m1(tensors["weight_packed"]) if self.e2m1 else tensors["weight"]
        return codes, {name: tensors[f"weight_{name}"] for name in names}

    # ---------------------------------------------------------------- config.json, in the words of compressed-tensors
    def to_config(self) -> dict[str, Any]:
        fields = asdict(self)
        dtype = str(_SCALE_DTYPES[fields.pop("scales")])
        del fields["global_scale"]
        fields["strategy"] = "tensor_group" if self.scales == "e4m3" else "group"
        return {"num_bits": fields.pop("bits"), **fields, "dynamic": False, "scale_dtype": dtype, "zp_dtype": dtype}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> BlockFloat | None:
        """The block floats that the `QuantizationArgs` of compressed-tensors mean; None where they mean another grid.

        Raises:
            ValueError: scales of a dtype that block floats do not have.
        """
        dtype, two_scales = arguments.get("scale_dtype"), arguments["strategy"] == "tensor_group"
        if arguments["type"] != "float" or (arguments["num_bits"] != 4 and "uint8" not in str(dtype)):
            return None
        scales: Literal["e8m0", "e4m3"] = "e4m3" if two_scales else "e8m0"
        if dtype is not None and str(dtype) != str(_SCALE_DTYPES[scales]):
            raise ValueError(f"scale_dtype of its block floats is {dtype}, this runtime reads {_SCALE_DTYPES[scales]}")
        strategy: Any = "group" if two_scales else arguments["strategy"]
        return cls(arguments["num_bits"], "float", arguments["symmetric"], strategy, arguments["group_size"], scales)


def round_e2m1_(halves: torch.Tensor) -> torch.Tensor:
    """Nearest values of e2m1, all in halves, ties to an even mantissa, in place; not clamped."""
    size = halves.abs()
    unit = torch.where(size > 8, 4.0, torch.where(size > 4, 2.0, 1.0))
    return halves.div_(unit).round_().mul_(unit)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes in halves `[out, in]`, int8, as uint8 `[out, in / 2]`: sign, two bits of exponent, one of mantissa; the lower nibble first.

    Raises:
        CompressError: a code that e2m1 does not have.
    """
    rows, columns = codes.shape
    nibble = torch.full((256,), 255, dtype=torch.uint8, device=codes.device)
    for index, magnitude in enumerate(_MAGNITUDES):
        nibble[-magnitude], nibble[magnitude] = index | 8, index
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=codes.device)
    for start, stop in row_slices(rows, columns, _SLICE):
        found = nibble[codes[start:stop].contiguous().view(torch.uint8).int()]
        if bool((found == 255).any()):
            raise CompressError("block floats have a code that e2m1 does not have")
        packed[start:stop] = found[:, ::2] | found[:, 1::2] << 4
    return packed


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_e2m1`; minus zero is 0."""
    halves = HALVES.to(packed.device)
    pairs = torch.stack([halves.repeat(16), halves.repeat_interleave(16)], dim=-1)  # of every byte
    rows, columns = packed.shape
    codes = torch.empty(rows, columns, 2, dtype=torch.int8, device=packed.device)
    for start, stop in row_slices(rows, columns, _SLICE):
        codes[start:stop] = pairs[packed[start:stop].int()]
    return codes.flatten(1)
