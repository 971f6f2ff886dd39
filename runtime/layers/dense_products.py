"""Products of 16-bit matrices on CPUs that have no 16-bit arithmetic.

A CPU without bfloat16 arithmetic (AVX2 only, say) multiplies bfloat16 matrices up to ten times slower than float32 ones, and few CPUs have
float16 arithmetic. A 16-bit product is float32 sums of exact products, rounded once; computing it in float32 and rounding the result is the
same up to the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from runtime.system import processes

#: Products; of each the place and the name of the left matrix, and the name of the right one, which follows it. Products of groups
#: (`grouped_mm`) are not among them: a copy of all experts would be made.
_PRODUCTS: dict[Callable[..., Any], tuple[int, str, str]] = {
    torch.nn.functional.linear: (0, "input", "weight"),
    torch.matmul: (0, "input", "other"),
    torch.mm: (0, "input", "mat2"),
    torch.bmm: (0, "input", "mat2"),
    torch.addmm: (1, "mat1", "mat2"),
    torch.baddbmm: (1, "batch1", "batch2"),
    torch.Tensor.matmul: (0, "self", "other"),
    torch.Tensor.mm: (0, "self", "mat2"),
    torch.Tensor.bmm: (0, "self", "mat2"),
    torch.Tensor.addmm: (1, "mat1", "mat2"),
    torch.Tensor.baddbmm: (1, "batch1", "batch2"),
    torch.Tensor.__matmul__: (0, "self", "other"),
}
#: With fewer rows it takes longer to widen a weight than to multiply it as it is.
FEWEST_ROWS = 16
#: Types that few CPUs multiply.
WIDENED = (torch.bfloat16, torch.float16)
_BY_TORCH = "_multiplied_by_torch"  # attribute of a model whose products are left alone


class WidenedProducts(TorchFunctionMode):
    """While active, products of 16-bit CPU tensors with `FEWEST_ROWS` rows or more are computed in float32 and rounded to their type.

    Args:
        most: elements of a float32 copy of the right matrix (of a batch: of all of them); weights of larger linear layers are multiplied in
            parts, other larger matrices as they are. None: of any size.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        place, *names = _PRODUCTS[func]
        left, right = (args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names, place))
        if not (_narrow(left) and _narrow(right) and left.dtype == right.dtype and _has_many_rows(left, right)):
            return func(*args, **kwargs)
        if self._most is not None and right.numel() > self._most:
            return self._in_parts(*args, **kwargs) if func is torch.nn.functional.linear else func(*args, **kwargs)
        return func(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()}).to(left.dtype)

    def _in_parts(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert self._most is not None
        wide, size = input.float(), max(1, self._most // weight.shape[1])
        parts = []
        for start in range(0, len(weight), size):
            part = slice(start, start + size)
            own = None if bias is None else bias[part].float()
            parts.append(torch.nn.functional.linear(wide, weight[part].float(), own).to(input.dtype))
        return torch.cat(parts, -1)


def products(device: torch.device, dtype: torch.dtype, most: int | None = None) -> AbstractContextManager[Any]:
    """The context in which a model of this dtype runs on `device`: `WidenedProducts` where they are faster, nothing elsewhere."""
    return WidenedProducts(most) if device.type == "cpu" and is_slow(dtype) else nullcontext()


def leave_products(module: torch.nn.Module) -> None:
    """Have a model multiply as torch does, so that it computes the same bits as transformers."""
    module.__dict__[_BY_TORCH] = True


def products_of(module: torch.nn.Module, device: torch.device, most: int) -> AbstractContextManager[Any]:
    """The context in which the modules of a model run, whose dtype is that of the weights that are not packed."""
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    return nullcontext() if _BY_TORCH in module.__dict__ else products(device, dtype, most)


def is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` faster as float32 ones."""
    return dtype in WIDENED and not processes.multiplies(dtype)


def _has_many_rows(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a product (of a batch: each) has `FEWEST_ROWS` or more."""
    rows = left.shape[-2:-1] if right.dim() > 2 else left.shape[:-1]
    return left.dim() > 1 and rows.numel() >= FEWEST_ROWS


def _narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in WIDENED and value.device.type == "cpu"


def _widen(value: Any) -> Any:
    return value.float() if _narrow(value) else value
