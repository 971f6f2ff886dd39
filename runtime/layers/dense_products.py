"""Products of 16-bit matrices on CPUs that have no 16-bit arithmetic.

A CPU without bfloat16 arithmetic (AVX2 only, say) multiplies bfloat16 matrices up to ten times slower than float32 ones, and float16 ones
few CPUs multiply any faster. A 16-bit product is float32 sums of exact products, rounded once; computing it in float32 and rounding the
result is the same up to the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from runtime.system import processes

#: Products, and which argument is the left matrix.
_PRODUCTS: dict[Callable[..., Any], int] = {
    torch.nn.functional.linear: 0,
    torch.matmul: 0,
    torch.mm: 0,
    torch.bmm: 0,
    torch.addmm: 1,
    torch.baddbmm: 1,
    torch.Tensor.matmul: 0,
    torch.Tensor.mm: 0,
    torch.Tensor.bmm: 0,
    torch.Tensor.__matmul__: 0,
}
#: With fewer rows it takes longer to widen a weight than to multiply it as it is.
FEWEST_ROWS = 16
WIDENED = (torch.bfloat16, torch.float16)


class WidenedProducts(TorchFunctionMode):
    """While active, products of 16-bit CPU tensors with `FEWEST_ROWS` rows or more are computed in float32 and rounded to their type.

    Args:
        most: elements of a matrix that is widened, which takes 4 bytes each; None: of any.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = _PRODUCTS.get(func)
        if place is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        given = (*args, *kwargs.values())
        narrow = [value for value in given if _narrow(value)]
        left = args[place] if len(args) > place else kwargs.get("input")
        if not _narrow(left) or self._is_quick(left, narrow):
            return func(*args, **kwargs)
        return func(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()}).to(left.dtype)

    def _is_quick(self, left: torch.Tensor, narrow: list[torch.Tensor]) -> bool:
        """Whether a product is left as it is."""
        if left.numel() < FEWEST_ROWS * left.shape[-1]:
            return True
        return self._most is not None and any(value.numel() > self._most for value in narrow)


def products(device: torch.device, dtype: torch.dtype, most: int | None = None) -> AbstractContextManager[Any]:
    """The context in which a model of this dtype runs on `device`: `WidenedProducts` where they are faster, nothing elsewhere."""
    return WidenedProducts(most) if device.type == "cpu" and is_slow(dtype) else nullcontext()


def is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` faster as float32 ones."""
    return dtype in WIDENED and not processes.multiplies(dtype)


def _narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in WIDENED and value.device.type == "cpu"


def _widen(value: Any) -> Any:
    return value.float() if _narrow(value) else value
