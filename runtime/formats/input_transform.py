"""Change of basis of a layer's inputs: a product with two small matrices, which spreads outliers before inputs and weights are rounded, or
another order of its features, which brings them together.

Kronecker products of learned matrices are those of FlatQuant (Sun et al., 2024, arXiv 2410.09426), of Hadamard matrices the online
rotations of QuaRot (Ashkboos et al., 2024, arXiv 2404.00456), and one matrix for every group of columns that of MR-GPTQ (Egiazarian et al.,
2025, arXiv 2509.23202).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.formats.cut import Axes
from runtime.formats.representation import Tensors, TensorSpec

LEFT, RIGHT, ORDER = "input_left", "input_right", "input_order"
MOST = 1024
"""Rows of a matrix, at most: for a prime number of columns it would be as wide as the layer."""
STORED = torch.float16


@dataclass(frozen=True)
class InputTransform:
    """`x [..., in]` becomes `x T`: each block of a row, as a matrix `X [left, right]`, becomes `L^T X R`.

    A layer stores `W T^-T`, so that the product is that of `x` and `W`.

    Attributes:
        name: of the method that found the matrices.
        block_size: columns of a block, all of which have one matrix `R`; None: a row is one block, with `L` and `R` as square as can be.
    """

    name: str
    block_size: int | None = None

    def sizes(self, columns: int) -> tuple[int, int]:
        """(left, right) for rows of `columns` numbers."""
        if self.block_size is not None:
            return 1, self.block_size
        left = next(size for size in range(math.isqrt(columns), 0, -1) if columns % size == 0)
        return left, columns // left

    def why_not(self, columns: int) -> str | None:
        """The reason rows of `columns` numbers have no such transform; None when they have."""
        if self.block_size is not None and columns % self.block_size:
            return f"input transform {self.name} wants a multiple of {self.block_size} columns, not {columns}"
        largest = max(self.sizes(columns))
        if largest > MOST:
            return f"{columns} columns have no two factors of at most {MOST}, the sizes of the matrices of input transform {self.name}"
        return None

    def tensors(self, columns: int) -> dict[str, TensorSpec]:
        """Its matrices as a module stores them: in 16 bits, since the weight is that of the rounded ones."""
        left, right = self.sizes(columns)
        whole: Axes = (None, None)
        found = {RIGHT: TensorSpec((right, right), STORED, whole)}
        return found if left == 1 else found | {LEFT: TensorSpec((left, left), STORED, whole)}

    def of_inputs(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """`x T` for `x [..., in]`, in the dtype of `x`; computed in float32 (float64 where `x` is)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return multiplied(x.to(dtype), *matrices(tensors)).to(x.dtype)

    def to_weight(self, weight: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """`W T^-T` of a weight `[out, in]`, what the layer stores: float32, or float64 where the weight is."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return multiplied(wide, *matrices(tensors, lambda each: torch.linalg.inv(each.double()).T))

    def of_weight(self, weight: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """`W` of what the layer stores, in its dtype; computed in float32."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return multiplied(wide, *matrices(tensors, lambda each: each.T)).to(weight.dtype)

    def to_config(self) -> dict[str, Any]:
        """As `config_groups` has it."""
        return {"name": self.name} | ({} if self.block_size is None else {"block_size": self.block_size})

    @classmethod
    def from_config(cls, config: Any) -> InputTransform:
        """Inverse of `to_config`; ValueError for what is none."""
        if not isinstance(config, Mapping) or not isinstance(config.get("name"), str):
            raise ValueError(f"input_transform is {config!r}, expected its name")
        block_size = config.get("block_size")
        if block_size is not None and (
            isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1
        ):
            raise ValueError(f"input_transform has block_size {block_size!r}, expected a positive integer")
        if config.get("order", False) is not True:
            return InputTransform(config["name"], block_size)
        if block_size is not None:
            raise ValueError("input_transform has an order of all features and a block_size, expected one of the two")
        return InputOrder(config["name"])

    def find_corruption(self, tensors: Tensors) -> tuple[str, str] | None:
        """Name of a tensor that is none of such a transform, and what is wrong; shapes and dtypes are right."""
        wrong = [name for name in (LEFT, RIGHT) if name in tensors and not bool(tensors[name].isfinite().all())]
        return (wrong[0], "holds NaN or Inf") if wrong else None


class InputOrder(InputTransform):
    """`x [..., in]` becomes `x[..., order]`, and a layer stores `W[:, order]`. Nothing is rounded by it."""

    def why_not(self, columns: int) -> str | None:
        return None

    def tensors(self, columns: int) -> dict[str, TensorSpec]:
        return {ORDER: TensorSpec((columns,), torch.int32, (None,))}

    def of_inputs(self, x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return x.index_select(-1, tensors[ORDER])

    def to_weight(self, weight: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return wide.index_select(-1, tensors[ORDER])

    def of_weight(self, weight: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return weight.index_select(-1, tensors[ORDER].argsort())

    def to_config(self) -> dict[str, Any]:
        return {"name": self.name, "order": True}

    def find_corruption(self, tensors: Tensors) -> tuple[str, str] | None:
        order = tensors[ORDER]
        places = torch.arange(len(order), dtype=order.dtype, device=order.device)
        return None if bool((order.sort().values == places).all()) else (ORDER, "is no order of the features")


def matrices(
    tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor] = lambda each: each
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`L` (None: there is none) and `R` among the tensors of a module, or what `change` makes of each."""
    left = tensors.get(LEFT)
    return None if left is None else change(left), change(tensors[RIGHT])


def multiplied(x: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor) -> torch.Tensor:
    """`L^T X R` of every block of the rows `[..., n]`, in the dtype of `x`."""
    right = right.to(x.dtype)
    if left is None:
        return (x.unflatten(-1, (-1, len(right))) @ right).flatten(-2)
    blocks = x.unflatten(-1, (-1, len(left), len(right)))
    return (left.to(x.dtype).T @ (blocks @ right)).flatten(-3)
