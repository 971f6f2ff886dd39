"""Shapes, dtypes and contents that stored tensors and solved weights must have, and what is said when they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runtime.errors import ArtifactError, CompressError
from runtime.formats.scheme import CompressedWeight, Scheme, WeightScheme

Shape = tuple[int, int]
Tensors = dict[str, torch.Tensor]

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


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
    """Raise CompressError when the parts of `weight` do not fit together or a pruned position is not zero."""
    scheme, values = weight.scheme.weights, weight.values
    shape = (values.shape[0], values.shape[1])
    expected = weight.dtype if scheme is None else (torch.int8 if scheme.type == "int" else FLOAT8)
    if values.dtype != expected:
        raise CompressError(f"compressed weight has values in {_short(values.dtype)}, expected {_short(expected)}")
    if scheme is not None:
        grid = grid_shape(scheme, shape)
        if weight.scale is None or tuple(weight.scale.shape) != grid:
            found = None if weight.scale is None else list(weight.scale.shape)
            raise CompressError(f"compressed weight {list(shape)} has scales of shape {found}, expected {list(grid)}")
        if (weight.zero_point is None) != scheme.symmetric:
            raise CompressError("compressed weight must have a zero point exactly when its scheme is asymmetric")
        if weight.zero_point is not None:
            if tuple(weight.zero_point.shape) != grid or weight.zero_point.dtype != torch.int8:
                raise CompressError(f"compressed weight has a zero point that is not int8 {list(grid)}")
            _check_range(weight.zero_point, scheme, "zero point")
        if scheme.type == "int":
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
    return values != expand_groups(weight.zero_point, weight.scheme.weights, values.shape[1])


def kept(weight: CompressedWeight) -> torch.Tensor:
    """Bool `[out, in]`: the mask, or what is not zero when the solver gave none."""
    return weight.mask if weight.mask is not None else nonzero(weight)


def expand_groups(grid: torch.Tensor, scheme: WeightScheme | None, columns: int) -> torch.Tensor:
    """Spread per-group numbers `[out, groups]` over the columns they rule; other strategies broadcast as they are."""
    if scheme is None or scheme.strategy != "group":
        return grid
    assert scheme.group_size is not None
    if columns % scheme.group_size == 0:
        return grid.repeat_interleave(scheme.group_size, dim=1)
    return grid[:, torch.arange(columns, device=grid.device) // scheme.group_size]


def join(where: str, name: str) -> str:
    """Full tensor name."""
    return f"{where}.{name}" if where else name


def why_not_weights(scheme: Scheme, shape: Shape) -> str | None:
    """Reasons no format has a remedy for: number grids that do not exist."""
    weights, activations = scheme.weights, scheme.activations
    if weights is None:
        return "activations are quantized but weights are not" if activations is not None else None
    if weights.type == "int" and not 2 <= weights.bits <= 8:
        return f"integer weights have 2 to 8 bits, not {weights.bits}"
    if weights.type == "float" and (weights.bits != 8 or not weights.symmetric):
        return "float weights are 8-bit e4m3 and symmetric"
    if weights.strategy == "group":
        if not weights.group_size or weights.group_size < 1:
            return "strategy group needs a group_size of at least 1"
        if weights.group_size > shape[1]:
            return f"group size {weights.group_size} is larger than the row of {shape[1]} weights"
    return None


def ragged(scheme: WeightScheme, shape: Shape) -> bool:
    """True when the last group of a row is shorter than the others."""
    return scheme.strategy == "group" and shape[1] % (scheme.group_size or 1) != 0


def grid_shape(scheme: WeightScheme, shape: Shape) -> tuple[int, ...]:
    return (1,) if scheme.strategy == "tensor" else (shape[0], scheme.groups(shape[1]))


def _check_range(codes: torch.Tensor, scheme: WeightScheme, what: str) -> None:
    if scheme.type != "int" or codes.numel() == 0:
        return
    low, high = scheme.code_range
    smallest, largest = (int(v) for v in codes.aminmax())
    if smallest < low or largest > high:
        raise CompressError(f"compressed weight has a {what} outside [{low}, {high}]: found [{smallest}, {largest}]")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
