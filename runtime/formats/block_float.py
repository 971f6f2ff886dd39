"""Block floats: 4- or 8-bit floating-point weights with a scale for every block of a row, itself a power of two or a float8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from runtime.formats.float8 import FLOAT8, FLOAT8_MAXIMUM, round_float8, widen
from runtime.formats.grid import GridScheme
from runtime.formats.representation import Shape, Tensors, TensorSpec

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Magnitudes of e2m1, doubled, by its lower three bits."""
_SCALE_DTYPES = {"e8m0": torch.uint8, "e4m3": FLOAT8}


@dataclass(frozen=True)
class BlockFloat(GridScheme):
    """Floats of a few bits that share a scale: MXFP4 and MXFP8 (OCP Microscaling 1.0, 2023, arXiv 2310.10537), NVFP4 (NVIDIA, 2025).

    `bits` 4: e2m1, so 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; codes are int8, in halves. `bits` 8: e4m3, codes are float8.
    Parameters, as stored: `scale` `[out, in / group_size]`, and for `scales == "e4m3"` `global_scale` float32 `[1]`. `scales`:

    - `e8m0`: a power of two, uint8, the exponent plus 127;
    - `e4m3`: float8, to be divided by `global_scale`.

    Attributes:
        global_scale: of the matrices that a grid was `bound` to; no part of the scheme.
    """

    name = "block_float"
    type: Literal["int", "float"] = "float"
    group_size: int | None = 32
    scales: Literal["e8m0", "e4m3"] = "e8m0"
    global_scale: float = field(default=1.0, compare=False, repr=False)

    def why_not(self, shape: Shape) -> str | None:
        if self.type != "float" or not self.symmetric or self.strategy != "group":
            return "block floats are symmetric, in groups"
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
        return self.bits == 4

    @property
    def code_range(self) -> tuple[int, int]:
        return -_HALVES[-1], _HALVES[-1]

    def round_(self, steps: torch.Tensor) -> torch.Tensor:
        size = steps.abs()
        unit = torch.where(size > 8, 4.0, torch.where(size > 4, 2.0, 1.0))
        return steps.div_(unit).round_().mul_(unit)

    # ---------------------------------------------------------------- scales: a step is what one code counts
    def bound(self, weights: Sequence[torch.Tensor]) -> GridScheme:
        if self.scales != "e4m3":
            return self
        largest = max((float(w.abs().amax()) for w in weights if w.numel()), default=0.0)
        # The largest of all values may become 4 at the largest scale: then even its block has both choices, 4 and 6.
        found = float(torch.tensor(FLOAT8_MAXIMUM * 4 / largest, dtype=torch.float32)) if largest > 0 else 1.0
        return replace(self, global_scale=found if 0 < found < float("inf") else 1.0)

    def covering(self, extreme: torch.Tensor) -> torch.Tensor:
        steps = super().covering(extreme)
        return steps.log2().ceil().exp2() if self.scales == "e8m0" else steps

    def storable(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        parameters = self.stored(torch.where(scale == 0, 1.0, scale.abs()), None, dtype)
        return self.steps(parameters)

    def stored(self, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> Tensors:
        whole = scale * 2 if self.e2m1 else scale
        if self.scales == "e8m0":
            exponent = whole.log2().round_().clamp_(-126, 127)  # 2^-127 is no normal float32
            return {"scale": (exponent + 127).to(torch.uint8)}
        of_block = round_float8(whole * self.global_scale).clamp_min_(2.0**-9).to(FLOAT8)
        return {"scale": of_block, "global_scale": torch.full((1,), self.global_scale, device=scale.device)}

    def steps(self, parameters: Tensors) -> torch.Tensor:
        """Stored scales as float32 steps, `[out, groups]`."""
        scale = parameters["scale"]
        if self.scales == "e8m0":
            whole = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.to(torch.int32) - 127)
        else:
            whole = widen(scale, torch.float32) / parameters["global_scale"]
        return whole / 2 if self.e2m1 else whole

    # ---------------------------------------------------------------- the calls of a representation
    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Scales that cover every block; `importance` has no say (methods search better ones)."""
        own = self.bound([weight])
        extreme = weight.view(weight.shape[0], -1, self.width(weight.shape[1])).abs().amax(-1)
        return own.stored(own.storable(own.covering(extreme), dtype), None, dtype)

    def nearest(self, columns: torch.Tensor, parameters: Tensors, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().nearest(columns, {"scale": self.steps(parameters)}, first)

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """`codes * steps`, computed in float32 as compressed-tensors does, or in `dtype` where that is wider."""
        return super().dequantize(codes, {"scale": self.steps(parameters)}, dtype)

    def rows(self, parameters: Tensors, index: torch.Tensor | slice) -> Tensors:
        return {name: p if name == "global_scale" else _take(p, index) for name, p in parameters.items()}

    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        packed = TensorSpec((shape[0], shape[1] // 2), torch.uint8)
        specs = {"weight_packed": packed} if self.e2m1 else {"weight": TensorSpec(shape, FLOAT8)}
        specs["weight_scale"] = TensorSpec(self.parameter_shape(shape), _SCALE_DTYPES[self.scales])
        return specs | ({"weight_global_scale": TensorSpec((1,), torch.float32)} if self.scales == "e4m3" else {})

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
        """The block floats that the `QuantizationArgs` of compressed-tensors mean; None where they mean another grid."""
        two_scales = arguments["strategy"] == "tensor_group"
        if arguments["type"] != "float" or (
            arguments["num_bits"] != 4 and "uint8" not in str(arguments.get("scale_dtype"))
        ):
            return None
        strategy: Any = "group" if two_scales else arguments["strategy"]
        scales: Literal["e8m0", "e4m3"] = "e4m3" if two_scales else "e8m0"
        return cls(arguments["num_bits"], "float", arguments["symmetric"], strategy, arguments["group_size"], scales)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes in halves `[out, in]`, int8, as uint8 `[out, in / 2]`: sign, two bits of exponent, one of mantissa; the lower nibble first."""
    index = torch.full((_HALVES[-1] + 1,), 0, dtype=torch.uint8, device=codes.device)
    index[list(_HALVES)] = torch.arange(len(_HALVES), dtype=torch.uint8, device=codes.device)
    nibbles = index[codes.abs().long()] | (codes < 0).to(torch.uint8) << 3
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_e2m1`; minus zero is 0."""
    halves = torch.tensor([*_HALVES, *(-value for value in _HALVES)], dtype=torch.int8, device=packed.device)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], -1)
    return halves[nibbles.int()]


def _take(parameter: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
    """Rows of a parameter; float8 as bytes, which every device can index."""
    return parameter.view(torch.uint8)[index].view(parameter.dtype)
