"""Grids: integers of 2 to 8 bits or float8 e4m3, times a scale (less a zero point) for every group of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

import torch

from runtime.formats.bitpack import row_slices
from runtime.formats.cut import COLUMNS, ROWS, Along, Axes
from runtime.formats.float8 import FLOAT8, FLOAT8_MAXIMUM, round_float8, widen
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SLICE = 1 << 18  # weights dequantized at once on a CPU


class Rounding(IntEnum):
    """How codes are found and what they stand for; the numbers are those of `compress/core/native/columns.c`."""

    INTEGER = 0  # round(weight / scale) + zero point, value (code - zero point) * scale
    E2M1 = 1  # 4-bit floats in halves: 0 to 4, 6, 8 and 12, of both signs
    MINIMUM = 2  # round((weight + minimum) / scale), value code * scale - minimum
    IQ4 = 3  # the 16 values of llama.cpp's IQ4


@dataclass(frozen=True)
class GridScheme(Representation):
    """Grid of a weight matrix `[out, in]`.

    `int`: `2 <= bits <= 8`, signed codes in `[-2^(bits-1), 2^(bits-1) - 1]`. `float`: `bits == 8`, float8 e4m3 (maximum 448), whose
    codes are the float8 values. `group_size` columns share one scale when `strategy == "group"`; the last group of a row may be shorter
    (ragged). Parameters: `scale` `[out, groups]` (`[out, 1]` for channel, `[1]` for tensor) in the model's dtype, and, unless symmetric,
    `zero_point` int8 of the same shape.
    """

    name = "grid"
    bits: int
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group"] = "group"
    group_size: int | None = None

    def why_not(self, shape: Shape) -> str | None:
        if self.type == "int" and not 2 <= self.bits <= 8:
            return f"integer weights have 2 to 8 bits, not {self.bits}"
        if self.type == "float" and (self.bits != 8 or not self.symmetric):
            return "float weights are 8-bit e4m3 and symmetric"
        if self.strategy == "group":
            if not self.group_size or self.group_size < 1:
                return "strategy group needs a group_size of at least 1"
            if self.group_size > shape[1]:
                return f"group size {self.group_size} is larger than the row of {shape[1]} weights"
        return None

    def describe(self) -> str:
        span = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        return f"{'fp' if self.type == 'float' else 'int'}{self.bits} {span}"

    # ---------------------------------------------------------------- groups
    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code, where codes are integers."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def integral(self) -> bool:
        """Whether a code is an integer that counts steps (else a float8)."""
        return self.type == "int"

    @property
    def rounding(self) -> Rounding:
        """Which numbers codes are."""
        return Rounding.INTEGER

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of codes."""
        return torch.int8 if self.integral else FLOAT8

    def width(self, columns: int) -> int:
        """Columns of a row of `columns` weights that share one scale."""
        return self.group_size if self.strategy == "group" and self.group_size else columns

    def unit(self, columns: int) -> int:
        """Columns whose scales are chosen together: whole groups."""
        return self.width(columns)

    def groups(self, columns: int) -> int:
        """How many scales one row of `columns` weights has."""
        return -(-columns // self.width(columns)) if self.strategy == "group" else 1

    def parameter_shape(self, shape: Shape) -> tuple[int, ...]:
        """Shape of scales and zero points."""
        return (1,) if self.strategy == "tensor" else (shape[0], self.groups(shape[1]))

    def ragged(self, shape: Shape) -> bool:
        """True when the last group of a row is shorter than the others."""
        return shape[1] % self.width(shape[1]) != 0

    def spread(self, parameter: torch.Tensor, columns: int, dim: int = 1) -> torch.Tensor:
        """One number for every column, from one for every group along `dim`; other strategies broadcast as they are."""
        if self.strategy != "group":
            return parameter
        index = torch.arange(columns, device=parameter.device) // self.width(columns)
        return parameter.index_select(dim, index)

    # ---------------------------------------------------------------- arithmetic
    def codes(
        self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Nearest codes of `weight`, as floats; scale and zero point have its shape, or broadcast. `out` may be worked in."""
        codes = torch.div(weight, scale, out=out)
        if not self.integral:
            return round_float8(codes)
        self.round_(codes)
        if zero is not None:
            codes += zero
        return codes.clamp_(*self.code_range)

    def round_(self, steps: torch.Tensor) -> torch.Tensor:
        """Nearest integers that can be codes, in place; not clamped yet."""
        return steps.round_()

    def values(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        """Weights that codes stand for, float32; likewise."""
        return (codes if zero is None else codes - zero) * scale

    def with_global_scale(self, weights: Sequence[torch.Tensor]) -> GridScheme:
        """The grid with the global scale of these weights `[out_i, in]`; itself where it has none, or has it already."""
        return self

    def covering_scale(self, extreme: torch.Tensor) -> torch.Tensor:
        """Smallest scales whose grids reach `extreme`, before they are made storable; for float elements."""
        return extreme / (self.code_range[1] if self.integral else FLOAT8_MAXIMUM)

    def storable(self, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`scale` as it is stored in a model of `dtype`, float32.

        An all-zero group gets 1, an underflow the smallest normal number.
        """
        tiny = torch.finfo(dtype).tiny
        small = scale.abs() < tiny
        rounded = scale.to(dtype).to(torch.float32)
        return torch.where(small, torch.where(scale == 0, 1.0, tiny), rounded)

    def parameters_of(self, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> Tensors:
        """Parameters as they are stored, from storable float32 scales and zero points."""
        return {"scale": scale.to(dtype)} | ({} if zero is None else {"zero_point": zero.to(torch.int8)})

    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Scales that cover the range of every group, which always has zero in it; `importance` has no say (methods search better ones)."""
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % self.width(columns)))
        grouped = padded.view(rows, -1, self.width(columns)) if self.strategy != "tensor" else weight.reshape(1, 1, -1)
        least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        low, high = (-FLOAT8_MAXIMUM, FLOAT8_MAXIMUM) if self.type == "float" else self.code_range
        if self.symmetric:
            scale, zero = self.storable(torch.maximum(-least, most) / ((high - low) / 2), dtype), None
        else:  # to the bit as `compress.quantize.grid.candidate_grids` has it
            scale = self.storable((most - least) * (torch.ones_like(most) / (high - low)), dtype)
            zero = (low - least / scale).round().clamp(low, high)
        parameters = self.parameters_of(scale, zero, dtype)
        return {name: p.reshape(self.parameter_shape((rows, columns))) for name, p in parameters.items()}

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = first // self.width(1) if self.strategy == "group" else 0
        own = {name: p.float().view(-1, p.shape[-1])[:, group] for name, p in parameters.items()}
        codes = self.codes(columns, *_pair(own))
        return self.values(codes, *_pair(own)), codes[0].to(self.code_dtype)

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """`(codes - zero_point) * scale`, computed in the scale's dtype as compressed-tensors does, or in `dtype` where that is wider."""
        rows, columns = codes.shape
        # On a CPU in slices that stay in the cache, which is several times faster; elsewhere at once.
        out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
        for start, stop in row_slices(rows, columns, _SLICE) if codes.device.type == "cpu" else [(0, rows)]:
            part = slice(start, stop)
            out[part] = self._dequantized(codes[part], *_pair(self.rows(parameters, part)), dtype)
        return out

    def _dequantized(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, columns = codes.shape
        scale = scale.to(torch.promote_types(scale.dtype, dtype))
        dense = codes.to(scale.dtype) if self.integral else widen(codes, scale.dtype)
        zero = None if zero is None else zero.to(scale.dtype)
        if self.strategy == "group" and not self.ragged((rows, columns)):
            # Broadcasting is several times faster than spreading the scales.
            dense, scale = dense.view(rows, -1, self.width(columns)), scale.unsqueeze(-1)
            zero = None if zero is None else zero.unsqueeze(-1)
        else:
            scale, zero = self.spread(scale, columns), None if zero is None else self.spread(zero, columns)
        return self.values(dense, scale, zero).view(rows, columns)

    # ---------------------------------------------------------------- on disk
    @property
    def rows_apart(self) -> bool:
        return self.strategy != "tensor"

    def parameter_tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Scales and zero points as they lie on disk where nothing packs them."""
        grid, axes = self.parameter_shape(shape), self.parameter_axes
        specs = {"weight_scale": TensorSpec(grid, scale_dtype(dtype), axes)}
        return specs if self.symmetric else specs | {"weight_zero_point": TensorSpec(grid, torch.int8, axes)}

    @property
    def parameter_axes(self) -> Axes:
        """What the dimensions of scales and zero points follow."""
        if self.strategy == "tensor":
            return (None,)
        return ROWS, Along(1, self.group_size) if self.strategy == "group" and self.group_size else None

    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(shape, self.code_dtype, (ROWS, COLUMNS)), **self.parameter_tensors(shape, dtype)}

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        return {"weight": codes, **{f"weight_{name}": tensor for name, tensor in parameters.items()}}

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        names = ("scale",) if self.symmetric else ("scale", "zero_point")
        return tensors["weight"], {name: tensors[f"weight_{name}"] for name in names}

    def to_config(self) -> dict[str, Any]:
        """In the words of compressed-tensors."""
        fields = asdict(self)
        return {"num_bits": fields.pop("bits"), **fields, "dynamic": False}


def _pair(parameters: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    return parameters["scale"], parameters.get("zero_point")


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scales are stored in the model's dtype; float16 for a model in a dtype that is no plain float (as compressed-tensors)."""
    return dtype if dtype in SCALE_DTYPES else torch.float16
