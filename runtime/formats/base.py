"""What a storage format is: which schemes it can store, which tensors that makes, and how to lay out and read the
bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from runtime.errors import ArtifactError, RequestError
from runtime.formats.bitpack import pack_columns, packed_words, unpack_columns
from runtime.formats.checks import (
    FLOAT8,
    SCALE_DTYPES,
    Shape,
    Tensors,
    TensorSpec,
    check_tensor,
    check_weight,
    grid_shape,
    join,
)
from runtime.formats.scheme import CompressedWeight, Scheme, WeightScheme


class Format(ABC):
    """One way to store a compressed weight matrix `[out, in]`.

    Attributes:
        name: what `config.json` calls it.
        own: False when compressed-tensors knows the format, True when only this runtime reads it.
    """

    name: str
    own: bool = True

    @abstractmethod
    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        """The reason this format cannot store the scheme at this shape; None when it can."""

    @abstractmethod
    def weight_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        """The tensors that hold the weight itself (no scales, no activation parameters)."""

    @abstractmethod
    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        """Lay out the weight: exactly the tensors of `weight_tensors`."""

    @abstractmethod
    def unpack_weight(
        self, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values `[out, in]` and mask (None when the format stores none); `zero` is the unpacked zero point."""

    def zero_point_packed(self, scheme: WeightScheme) -> bool:
        """True when the zero point is bit-packed along the rows, as `pack-quantized` does for groups and channels."""
        return False

    def count(self, weight: CompressedWeight) -> int | None:
        """How many values are stored when the scheme does not tell (`bitmap`); None for every other format."""
        return None

    def tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None = None
    ) -> dict[str, TensorSpec]:
        """Every tensor of a module on disk, by its name inside the module.

        `dtype` is the dtype of the model (scales have it); `count` the number of stored values, for `bitmap` only.
        Static activation schemes add `input_scale` (and `input_zero_point`), which `pack` writes when it is given them.

        Raises:
            RequestError: the format cannot store this scheme at this shape.
        """
        self._require(scheme, shape)
        specs = self.weight_tensors(scheme, shape, dtype, count)
        if scheme.weights is not None:
            grid = grid_shape(scheme.weights, shape)
            specs["weight_scale"] = TensorSpec(grid, scale_dtype(dtype))
            if not scheme.weights.symmetric:
                if self.zero_point_packed(scheme.weights):
                    words = packed_words(grid[0], scheme.weights.bits)
                    specs["weight_zero_point"] = TensorSpec((words, grid[1]), torch.int32)
                else:
                    specs["weight_zero_point"] = TensorSpec(grid, torch.int8)
        return specs | input_tensors(scheme, dtype)

    def pack(
        self,
        weight: CompressedWeight,
        input_scale: torch.Tensor | None = None,
        input_zero_point: torch.Tensor | None = None,
    ) -> Tensors:
        """Tensors of `tensors(...)` for this weight. Bit-exact: `unpack` gives back the same dequantized matrix.

        Raises:
            RequestError: the format cannot store this scheme.
            CompressError: the weight breaks the contract of `CompressedWeight` (a bug in a solver, never bad input).
        """
        weight = _on_cpu(weight)  # where files are written from
        shape = (weight.values.shape[0], weight.values.shape[1])
        self._require(weight.scheme, shape)
        check_weight(weight)
        out = {name: tensor.contiguous() for name, tensor in self.pack_weight(weight).items()}
        if weight.scheme.weights is not None:
            assert weight.scale is not None
            out["weight_scale"] = weight.scale.contiguous()
            if weight.zero_point is not None:
                zero = weight.zero_point
                packed = self.zero_point_packed(weight.scheme.weights)
                out["weight_zero_point"] = (
                    pack_columns(zero, weight.scheme.weights.bits) if packed else zero.contiguous()
                )
        if input_scale is not None:
            out["input_scale"] = input_scale.cpu().reshape(1)
        if input_zero_point is not None:
            out["input_zero_point"] = input_zero_point.cpu().reshape(1)
        return out

    def unpack(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        dtype: torch.dtype,
        where: str = "",
        check: bool = True,
    ) -> CompressedWeight:
        """Inverse of `pack`. `where` is the module's name, for messages; `check=False` is for tensors `validate` has
        passed.

        Raises:
            ArtifactError: a tensor is missing or has the wrong shape, dtype or content.
        """
        if check:
            self._require(scheme, shape)
            self.validate(tensors, scheme, shape, dtype, where)
        scale = zero = None
        if scheme.weights is not None:
            scale = tensors["weight_scale"]
            if not scheme.weights.symmetric:
                zero = tensors["weight_zero_point"]
                if self.zero_point_packed(scheme.weights):
                    zero = unpack_columns(zero, scheme.weights.bits, scale.shape[0])
        values, mask = self.unpack_weight(tensors, scheme, shape, zero)
        return CompressedWeight(values, scale, zero, mask, scheme, dtype)

    def validate(self, tensors: Tensors, scheme: Scheme, shape: Shape, dtype: torch.dtype, where: str = "") -> None:
        """Raise ArtifactError, naming the tensor, unless every weight tensor is there with the right shape and
        dtype.
        """
        specs = self.tensors(scheme, shape, dtype, self.stored_count(tensors, where))
        for name, spec in specs.items():
            if name.startswith("input_"):
                continue  # not part of the weight: whoever runs the layer checks them
            check_tensor(tensors, name, spec, where)
        declared = tensors.get("weight_shape")
        if declared is not None and declared.device.type != "meta" and tuple(declared.tolist()) != tuple(shape):
            raise ArtifactError(
                f"tensor {join(where, 'weight_shape')} says {declared.tolist()} but the model has {list(shape)} there"
            )
        self.validate_content(tensors, shape, where)

    def validate_content(self, tensors: Tensors, shape: Shape, where: str) -> None:  # noqa: B027
        """Raise ArtifactError when numbers that steer the unpacking (positions, counts) contradict each other."""

    def select_rows(self, tensors: Tensors, scheme: Scheme, shape: Shape, rows: torch.Tensor) -> Tensors:
        """The tensors of the matrix made of these rows (int64 `[n]`) only, so that a lookup unpacks no more than it
        needs.
        """
        out = self.select_weight_rows(tensors, scheme, rows)
        if "weight_shape" in tensors:
            out["weight_shape"] = torch.tensor([rows.numel(), shape[1]], dtype=torch.int64)
        for name in ("weight_scale", "weight_zero_point"):
            grid = tensors.get(name)
            if grid is None or scheme.weights is None:
                continue
            if scheme.weights.strategy == "tensor":
                out[name] = grid
            elif name == "weight_zero_point" and self.zero_point_packed(scheme.weights):
                # Every selected zero point has its own bit offset in its column, so the columns are opened.
                bits = scheme.weights.bits
                out[name] = pack_columns(unpack_columns(grid, bits, shape[0])[rows], bits)
            else:
                out[name] = grid[rows]
        return out

    def select_weight_rows(self, tensors: Tensors, scheme: Scheme, rows: torch.Tensor) -> Tensors:
        """`select_rows` for the tensors of `weight_tensors`; right for every format that stores row by row."""
        names = ("weight", "weight_packed", "weight_values", "weight_metadata")
        return {name: _rows_of(tensors[name], rows) for name in names if name in tensors}

    def stored_count(self, tensors: Tensors, where: str = "") -> int | None:
        """`count` of `tensors(...)` as the stored tensors tell it; None when the format has no such number."""
        return None

    def bytes_estimate(self, scheme: Scheme, shape: Shape, dtype: torch.dtype, density: float = 1.0) -> int:
        """Bytes on disk for a matrix of which the fraction `density` is kept (exact when the format has no count)."""
        specs = self.tensors(scheme, shape, dtype, round(shape[0] * shape[1] * density))
        return sum(spec.bytes for spec in specs.values())

    def _require(self, scheme: Scheme, shape: Shape) -> None:
        reason = self.why_not(scheme, shape)
        if reason is not None:
            raise RequestError(f"format {self.name} cannot store this weight: {reason}")


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scales are stored in the model's dtype; float16 for a model in a dtype that is no plain float (as
    compressed-tensors).
    """
    return dtype if dtype in SCALE_DTYPES else torch.float16


def input_tensors(scheme: Scheme, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """`input_scale` [1] and `input_zero_point` [1] of a static activation scheme."""
    activations = scheme.activations
    if activations is None or activations.dynamic:
        return {}
    specs = {"input_scale": TensorSpec((1,), scale_dtype(dtype))}
    if not activations.symmetric:
        specs["input_zero_point"] = TensorSpec((1,), torch.int8 if activations.type == "int" else FLOAT8)
    return specs


def _on_cpu(weight: CompressedWeight) -> CompressedWeight:
    if weight.values.device.type == "cpu":
        return weight
    zero, mask = weight.zero_point, weight.mask
    return replace(
        weight,
        values=weight.values.cpu(),
        scale=None if weight.scale is None else weight.scale.cpu(),
        zero_point=None if zero is None else zero.cpu(),
        mask=None if mask is None else mask.cpu(),
    )


def _rows_of(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if matrix.dtype == FLOAT8:  # has no index_select on every device; its bytes do
        return matrix.view(torch.uint8)[rows].view(FLOAT8)
    return matrix[rows]
