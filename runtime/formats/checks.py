"""Checks of stored tensors and of solved weights: shapes, dtypes, contents, and the errors that name what is wrong."""

from __future__ import annotations

import torch

from runtime.errors import ArtifactError, CompressError
from runtime.formats.float8 import FLOAT8
from runtime.formats.grid import SCALE_DTYPES, GridScheme
from runtime.formats.representation import Shape, Tensors, TensorSpec
from runtime.formats.scheme import CompressedWeight, Scheme


def check_tensor(tensors: Tensors, name: str, spec: TensorSpec, where: str) -> None:
    """Raise ArtifactError unless `tensors[name]` is as `spec` says.

    Plain floats (scales, kept float values) may be of another float dtype: a bfloat16 artifact can be run in float32.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise ArtifactError(f"tensor {join(where, name)} is missing")
    if tuple(tensor.shape) != spec.shape:
        raise ArtifactError(f"tensor {join(where, name)} has shape {list(tensor.shape)}, expected {list(spec.shape)}")
    if tensor.dtype != spec.dtype and not (tensor.dtype in SCALE_DTYPES and spec.dtype in SCALE_DTYPES):
        raise ArtifactError(f"tensor {join(where, name)} is {_short(tensor.dtype)}, expected {_short(spec.dtype)}")


def check_weight(weight: CompressedWeight) -> None:
    """Raise CompressError when the parts of a weight on a grid, or of floats, do not fit together or a pruned position is not zero."""
    scheme, values = weight.scheme.grid, weight.values
    expected = weight.dtype if scheme is None else scheme.code_dtype
    if values.dtype != expected:
        raise CompressError(f"compressed weight has values in {_short(values.dtype)}, expected {_short(expected)}")
    if scheme is not None:
        grid = scheme.parameter_shape(weight.shape)
        if weight.scale is None or tuple(weight.scale.shape) != grid:
            found = None if weight.scale is None else list(weight.scale.shape)
            raise CompressError(
                f"compressed weight {list(weight.shape)} has scales of shape {found}, expected {list(grid)}"
            )
        if (weight.zero_point is None) != scheme.symmetric:
            raise CompressError("compressed weight must have a zero point exactly when its scheme is asymmetric")
        if weight.zero_point is not None:
            if tuple(weight.zero_point.shape) != grid or weight.zero_point.dtype != torch.int8:
                raise CompressError(f"compressed weight has a zero point that is not int8 {list(grid)}")
            _check_range(weight.zero_point, scheme, "zero point")
        _check_range(values, scheme, "code")
    if weight.mask is not None:
        if weight.mask.shape != values.shape or weight.mask.dtype != torch.bool:
            raise CompressError("compressed weight has a mask that is not a bool tensor of the weight's shape")
        if bool((nonzero(weight) & ~weight.mask).any()):
            raise CompressError("compressed weight has a pruned position whose value is not zero")


def nonzero(weight: CompressedWeight) -> torch.Tensor:
    """Bool `[out, in]`: True where the dequantized value is not the grid's zero."""
    values = weight.values
    if weight.zero_point is None:
        return (values.view(torch.uint8) & 0x7F) != 0 if values.dtype == FLOAT8 else values != 0
    return values != weight.on_grid[0].spread(weight.zero_point, values.shape[1])


def kept(weight: CompressedWeight) -> torch.Tensor:
    """Bool `[out, in]`: the mask, or what is not zero when the solver gave none."""
    return weight.mask if weight.mask is not None else nonzero(weight)


def join(where: str, name: str) -> str:
    """Full tensor name."""
    return f"{where}.{name}" if where else name


def why_not_weights(scheme: Scheme, shape: Shape) -> str | None:
    """Reasons no format has a remedy for: grids that do not exist, and representations that bring tensors of their own."""
    if scheme.weights is None:
        if scheme.transform is not None:
            return "inputs are transformed but weights are not quantized"
        return "activations are quantized but weights are not" if scheme.activations is not None else None
    if scheme.grid is None:
        return f"it stores integers and float8, not {scheme.weights.describe()}"
    return scheme.grid.why_not(shape) or why_not_inputs(scheme, shape)


def why_not_inputs(scheme: Scheme, shape: Shape) -> str | None:
    """The reason the inputs of a layer of this shape cannot be transformed and rounded as the scheme says; None when they can."""
    reason = None if scheme.transform is None else scheme.transform.why_not(shape[1])
    return reason if reason is not None or scheme.activations is None else scheme.activations.why_not(shape[1])


def _check_range(codes: torch.Tensor, scheme: GridScheme, what: str) -> None:
    if scheme.type != "int" or codes.numel() == 0:
        return
    low, high = scheme.code_range
    smallest, largest = (int(v) for v in codes.aminmax())
    if smallest < low or largest > high:
        raise CompressError(f"compressed weight has a {what} outside [{low}, {high}]: found [{smallest}, {largest}]")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
