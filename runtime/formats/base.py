"""Storage format: which schemes it can store, which tensors that makes, and how codes are laid out and read.

`GridFormat` is the base of formats for weights on a grid; `OwnFormat` stores a representation as its own `tensors` say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from math import lcm
from typing import Any

import torch

from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.formats.bitpack import (
    pack_columns,
    pack_rows,
    pack_stream,
    packed_words,
    unpack_columns,
    unpack_rows,
    unpack_stream,
)  # fmt: skip
from runtime.formats.checks import check_tensor, check_weight, join, why_not_inputs, why_not_weights
from runtime.formats.cut import ROWS, Along, Axes, Cut, Index
from runtime.formats.float8 import FLOAT8
from runtime.formats.grid import GridScheme, scale_dtype
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec, rows_of
from runtime.formats.scheme import CompressedWeight, Scheme


class Format(ABC):
    """One way to store a compressed weight matrix `[out, in]`.

    Attributes:
        name: what `config.json` calls it.
        own: False when compressed-tensors knows the format, True when only this runtime reads it.
        positions: the tensor that says which weights are kept; None when no tensor does.
        counted: its size depends on the weights, by one number that `config.json` has too (`stored_count`).
    """

    name: str
    own: bool = True
    positions: str | None = None
    counted: bool = False

    @abstractmethod
    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        """The reason this format cannot store the scheme at this shape; None when it can."""

    @abstractmethod
    def weight_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        """The tensors that hold the weight and its parameters (no activation parameters)."""

    @abstractmethod
    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        """Lay out the weight: exactly the tensors of `weight_tensors`."""

    @abstractmethod
    def unpack_weight(self, tensors: Tensors, scheme: Scheme, shape: Shape, dtype: torch.dtype) -> CompressedWeight:
        """Inverse of `pack_weight`."""

    @abstractmethod
    def select_rows(self, tensors: Tensors, scheme: Scheme, shape: Shape, rows: torch.Tensor) -> Tensors:
        """The tensors of the matrix made of these rows (int64 `[n]`) only, so that a lookup unpacks no more than it needs."""

    def mask(self, tensors: Tensors, columns: int) -> torch.Tensor | None:
        """Bool `[out, columns]`, True = kept, from the tensor `positions`; None when it is not among the tensors."""
        return None

    def zero_point(self, tensors: Tensors, grid: GridScheme) -> torch.Tensor | None:
        """Zero points as int8, unpacked; None for symmetric grids."""
        return None if grid.symmetric else tensors["weight_zero_point"]

    def tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None = None
    ) -> dict[str, TensorSpec]:
        """Every tensor of a module on disk, by its name inside the module.

        `dtype` is the dtype of the model (scales have it); `count` the number of stored values, for formats whose size depends on it.
        Calibrated activation schemes (`input_scale`, ...) and input transforms add tensors of their own, which `pack` writes when it is
        given them.

        Raises:
            RequestError: the format cannot store this scheme at this shape.
        """
        self._require(scheme, shape)
        return self.weight_tensors(scheme, shape, dtype, count) | input_tensors(scheme, shape, dtype)

    def pack(self, weight: CompressedWeight, **inputs: torch.Tensor | None) -> Tensors:
        """Tensors of `tensors(...)` for this weight, with those `inputs` of `input_tensors` that are given.

        Bit-exact: `unpack` gives back the same dequantized matrix.

        Raises:
            RequestError: the format cannot store this scheme.
            CompressError: the weight breaks the contract of `CompressedWeight` (a bug in a solver, never bad input).
        """
        weight = _on_cpu(weight)  # where files are written from
        self._require(weight.scheme, weight.shape)
        out = {name: tensor.contiguous() for name, tensor in self.pack_weight(weight).items()}
        specs = input_tensors(weight.scheme, weight.shape, weight.dtype)
        return out | {
            name: tensor.cpu().reshape(specs[name].shape) for name, tensor in inputs.items() if tensor is not None
        }

    def unpack(
        self,
        tensors: Tensors,
        scheme: Scheme,
        shape: Shape,
        dtype: torch.dtype,
        where: str = "",
        check: bool = True,
    ) -> CompressedWeight:
        """Inverse of `pack`. `where` is the module's name, for messages; `check=False` is for tensors `validate` has passed.

        Raises:
            ArtifactError: a tensor is missing or has the wrong shape, dtype or content.
        """
        if check:
            self.validate(tensors, scheme, shape, dtype, where)
        return self.unpack_weight(tensors, scheme, shape, dtype)

    def validate(self, tensors: Tensors, scheme: Scheme, shape: Shape, dtype: torch.dtype, where: str = "") -> None:
        """Raise ArtifactError, naming the tensor, unless every weight tensor is there with the right shape and dtype.

        Parameters of activations are not part of the weight: whoever runs the layer checks them.
        """
        self._require(scheme, shape)
        for name, spec in self.weight_tensors(scheme, shape, dtype, self.stored_count(tensors, where)).items():
            check_tensor(tensors, name, spec, where)
        declared = tensors.get("weight_shape")
        if declared is not None and declared.device.type != "meta" and tuple(declared.tolist()) != tuple(shape):
            raise ArtifactError(
                f"tensor {join(where, 'weight_shape')} says {declared.tolist()} but the model has {list(shape)} there"
            )
        self.validate_content(tensors, shape, where)

    def validate_content(self, tensors: Tensors, shape: Shape, where: str) -> None:  # noqa: B027
        """Raise ArtifactError when numbers that steer the unpacking (positions, counts) contradict each other."""

    def unit(self, scheme: Scheme, shape: Shape, dtype: torch.dtype, axis: int) -> int:
        """Rows (`axis` 0) or columns (1) that stay together where the weight is cut: it is cut at multiples of so many.

        Raises:
            RequestError: it cannot be cut at all; the message names the format and the reason.
        """
        every = self._axes(scheme, shape, dtype).values()
        found = [along.span for axes in every for along in axes if along is not None and along.axis == axis]
        if axis == 0:
            return lcm(*found)
        transform, activations = scheme.transform, scheme.activations
        if transform is not None and transform.block_size is None:
            raise RequestError(
                f"format {self.name} cannot be cut: input transform {transform.name} mixes or reorders all columns (hadamard_groups only "
                "those of a group)"
            )
        if activations is not None and activations.int8_tail:
            raise RequestError(
                f"format {self.name} cannot be cut: the last {activations.int8_tail} columns have 8 bits"
            )
        inputs = (None if transform is None else transform.block_size, activations and activations.group_size)
        return lcm(*found, *(each or 1 for each in inputs))

    def cut(self, scheme: Scheme, dtype: torch.dtype, cut: Cut) -> dict[str, Index]:
        """Where the rows or columns of a cut lie in each tensor of `tensors`; `weight_shape` then says the shape of the whole.

        Scales that all rows or columns share go to every part.

        Raises:
            RequestError: as `unit`; a unit straddles the cut; or the format cannot store the part. The message names the format.
        """
        axes = self._axes(scheme, cut.whole, dtype)
        reason = cut.why_not(self.unit(scheme, cut.whole, dtype, cut.axis)) or self.why_not(scheme, cut.shape)
        if reason is not None:
            raise RequestError(f"format {self.name} cannot be cut to shape {list(cut.shape)}: {reason}")
        return {name: cut.index(own) for name, own in axes.items()}

    def _axes(self, scheme: Scheme, shape: Shape, dtype: torch.dtype) -> dict[str, Axes]:
        if self.counted:
            raise RequestError(
                f"format {self.name} cannot be cut: its values are one stream, whose places depend on the weights"
            )
        reason = None if scheme.weights is None else scheme.weights.why_not_cut()
        if reason is not None:
            raise RequestError(f"format {self.name} cannot be cut: {reason}")
        found = {}
        for name, spec in self.tensors(scheme, shape, dtype).items():
            if spec.axes is None:
                raise RequestError(
                    f"format {self.name} cannot be cut: it does not say which rows and columns {name} holds (`TensorSpec.axes`)"
                )
            found[name] = spec.axes
        return found

    def stored_count(self, tensors: Tensors, where: str = "") -> int | None:
        """How many values the tensors hold, for formats whose size depends on it; None for the others."""
        return None

    def expected_count(self, scheme: Scheme, shape: Shape, density: float) -> int | None:
        """About what `stored_count` will be for a matrix of which the fraction `density` is kept; None where that is None."""
        return None

    def bytes_estimate(self, scheme: Scheme, shape: Shape, dtype: torch.dtype, density: float = 1.0) -> int:
        """Bytes on disk for a matrix of which the fraction `density` is kept (exact when the format has no count)."""
        specs = self.tensors(scheme, shape, dtype, self.expected_count(scheme, shape, density))
        return sum(spec.bytes for spec in specs.values())

    def _require(self, scheme: Scheme, shape: Shape) -> None:
        reason = self.why_not(scheme, shape)
        if reason is not None:
            raise RequestError(f"format {self.name} cannot store this weight: {reason}")


class GridFormat(Format):
    """A format for weights on a grid, or of floats, and where they belong in the matrix.

    Values are in `weight_packed` (integers, bit-packed) or `weight_values` (floats), beside scales, zero points and `weight_shape`.
    """

    def position_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """The tensors that say where the values belong; none in a dense format."""
        return {}

    def value_shape(self, shape: Shape, count: int | None) -> tuple[int, ...]:
        """Shape of the values that are stored: rows, or one stream of `count`."""
        return shape

    #: Columns of a row that each stored value stands for.
    columns_per_value: int = 1

    def split(self, weight: CompressedWeight) -> tuple[Tensors, torch.Tensor]:
        """The tensors of `position_tensors`, and the values that are stored."""
        return {}, weight.values

    def place(
        self, stored: torch.Tensor, tensors: Tensors, scheme: Scheme, shape: Shape, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inverse of `split`: values `[out, in]` and mask (None when the format stores none); `zero` is the unpacked zero point."""
        return stored, None

    def weight_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        grid, values = scheme.grid, self.value_shape(shape, count)
        specs = self.position_tensors(shape) | {"weight_shape": TensorSpec((2,), torch.int64, (None,))}
        per = self.columns_per_value
        if grid is not None and grid.type == "int":
            words = (*values[:-1], packed_words(values[-1], grid.bits))
            specs["weight_packed"] = TensorSpec(words, torch.int32, (ROWS, Along.words(1, grid.bits, per)))
        else:
            specs["weight_values"] = TensorSpec(values, dtype if grid is None else FLOAT8, (ROWS, Along(1, per)))
        if grid is not None:
            specs |= grid.parameter_tensors(shape, dtype)
            if _packs_zero_point(grid):
                rows, groups = grid.parameter_shape(shape)
                axes = Along.words(0, grid.bits), grid.parameter_axes[1]
                specs["weight_zero_point"] = TensorSpec((packed_words(rows, grid.bits), groups), torch.int32, axes)
        return specs

    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        check_weight(weight)
        grid, (out, values) = weight.scheme.grid, self.split(weight)
        out["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        if grid is not None and grid.type == "int":
            out["weight_packed"] = (pack_stream if values.dim() == 1 else pack_rows)(values, grid.bits)
        else:
            out["weight_values"] = values
        return out if grid is None else out | self._parameters(weight.parameters, grid)

    def zero_point(self, tensors: Tensors, grid: GridScheme) -> torch.Tensor | None:
        zero = super().zero_point(tensors, grid)
        if zero is None or not _packs_zero_point(grid):
            return zero
        return unpack_columns(zero, grid.bits, tensors["weight_scale"].shape[0])

    def parameters(self, tensors: Tensors, grid: GridScheme) -> Tensors:
        """Scales and zero points as the grid has them, unpacked."""
        zero = self.zero_point(tensors, grid)
        return {"scale": tensors["weight_scale"]} | ({} if zero is None else {"zero_point": zero})

    def _parameters(self, parameters: Tensors, grid: GridScheme) -> Tensors:
        out = {f"weight_{name}": parameter for name, parameter in parameters.items()}
        if _packs_zero_point(grid):
            out["weight_zero_point"] = pack_columns(parameters["zero_point"], grid.bits)
        return out

    def unpack_weight(self, tensors: Tensors, scheme: Scheme, shape: Shape, dtype: torch.dtype) -> CompressedWeight:
        grid, packed = scheme.grid, tensors.get("weight_packed")
        if grid is not None and packed is not None:
            unpack = unpack_stream if packed.dim() == 1 else unpack_rows
            stored = unpack(packed, grid.bits, self.value_shape(shape, self.stored_count(tensors))[-1])
        else:
            stored = tensors["weight_values"]
        parameters = {} if grid is None else self.parameters(tensors, grid)
        values, mask = self.place(stored, tensors, scheme, shape, parameters.get("zero_point"))
        return CompressedWeight.of(values, parameters, mask, scheme, dtype)

    def select_rows(self, tensors: Tensors, scheme: Scheme, shape: Shape, rows: torch.Tensor) -> Tensors:
        out = self.select_code_rows(tensors, scheme, rows)
        if "weight_shape" in tensors:
            out["weight_shape"] = torch.tensor([rows.numel(), shape[1]], dtype=torch.int64)
        if scheme.grid is not None:
            # Every selected zero point has its own bit offset in its column, so the columns are opened.
            chosen = scheme.grid.rows(self.parameters(tensors, scheme.grid), rows)
            out |= self._parameters(chosen, scheme.grid)
        return out

    def select_code_rows(self, tensors: Tensors, scheme: Scheme, rows: torch.Tensor) -> Tensors:
        """`select_rows` for values and positions; right for every format that stores row by row."""
        names = ("weight_packed", "weight_values", "weight_metadata")
        return {name: rows_of(tensors[name], rows) for name in names if name in tensors}


class SparseFormat(GridFormat):
    """A format of pruned weights: the kept values, and the tensor `positions`."""

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason = why_not_weights(scheme, shape) or self.why_not_pattern(scheme, shape)
        if reason is None and scheme.activations is not None:
            reason = "weights with quantized activations are stored dense"
        if reason is None and scheme.transform is not None:
            reason = "weights in another basis of the inputs are stored dense"
        return reason

    @abstractmethod
    def why_not_pattern(self, scheme: Scheme, shape: Shape) -> str | None:
        """The reason the zeros do not fit, if there is one."""

    def pruned(self, kept: torch.Tensor, scheme: Scheme, shape: Shape, zero: torch.Tensor | None) -> torch.Tensor:
        """A matrix like the `kept` values in which every weight is pruned: the code of zero everywhere."""
        values = torch.zeros(shape, dtype=kept.dtype, device=kept.device)
        if zero is not None:
            assert scheme.grid is not None
            values.copy_(scheme.grid.spread(zero, shape[1]).expand(shape))
        return values


class OwnFormat(Format):
    """The tensors that a representation brings itself; the format has its name."""

    def __init__(self, kind: type[Representation]) -> None:
        self.kind, self.name, self.counted = kind, kind.name, kind.counted is not None

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        if not isinstance(scheme.weights, self.kind):
            return f"it stores weights of representation {self.name}"
        if scheme.sparsity is not None:
            return f"representation {self.name} stores dense weights only"
        return scheme.weights.why_not(shape) or why_not_inputs(scheme, shape)

    def weight_tensors(
        self, scheme: Scheme, shape: Shape, dtype: torch.dtype, count: int | None
    ) -> dict[str, TensorSpec]:
        own, dtype = _own(scheme), scale_dtype(dtype)
        return own.tensors(shape, dtype) if count is None else own.tensors_for_count(shape, dtype, count)

    def pack_weight(self, weight: CompressedWeight) -> Tensors:
        tensors = _own(weight.scheme).encode(weight.values, weight.parameters)
        wanted = self.weight_tensors(weight.scheme, weight.shape, weight.dtype, self.stored_count(tensors))
        found = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if found != wanted:
            raise CompressError(f"representation {self.name} encodes {found}, and its tensors are {wanted}")
        return tensors

    def stored_count(self, tensors: Tensors, where: str = "") -> int | None:
        if self.kind.counted is None:
            return None
        found = tensors.get(self.kind.counted)
        if found is None or found.dim() != 1:
            raise ArtifactError(f"tensor {join(where, self.kind.counted)} is missing or has not one dimension")
        return found.numel()

    def expected_count(self, scheme: Scheme, shape: Shape, density: float) -> int | None:
        return _own(scheme).expected_count(shape)

    def validate(self, tensors: Tensors, scheme: Scheme, shape: Shape, dtype: torch.dtype, where: str = "") -> None:
        super().validate(tensors, scheme, shape, dtype, where)
        found = _own(scheme).find_corruption(tensors, shape)
        if found is not None:
            raise ArtifactError(f"tensor {join(where, found[0])} {found[1]}")

    def unpack_weight(self, tensors: Tensors, scheme: Scheme, shape: Shape, dtype: torch.dtype) -> CompressedWeight:
        return CompressedWeight.of(*_own(scheme).decode(tensors, shape), None, scheme, dtype)

    def select_rows(self, tensors: Tensors, scheme: Scheme, shape: Shape, rows: torch.Tensor) -> Tensors:
        return _own(scheme).select_rows(tensors, shape, rows)


def input_tensors(scheme: Scheme, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """What is stored of the inputs: `ActivationScheme.tensors` and `InputTransform.tensors`."""
    found = {} if scheme.activations is None else scheme.activations.tensors(scale_dtype(dtype))
    return found if scheme.transform is None else found | scheme.transform.tensors(shape[1])


def _packs_zero_point(grid: GridScheme) -> bool:
    """Whether a `GridFormat` bit-packs zero points along the rows, as `pack-quantized` does for groups and channels."""
    return not grid.symmetric and grid.strategy != "tensor"


def _own(scheme: Scheme) -> Representation:
    assert scheme.weights is not None
    return scheme.weights


def _on_cpu(weight: CompressedWeight) -> CompressedWeight:
    if weight.values.device.type == "cpu":
        return weight
    moved: dict[str, Any] = {
        name: value.cpu() for name, value in vars(weight).items() if isinstance(value, torch.Tensor)
    }
    return replace(weight, **moved, own={name: tensor.cpu() for name, tensor in weight.own.items()})
