"""Modules that multiply by a matrix, however they hold it: nn.Linear, classes of models that compute the same, and GPT-2's Conv1D."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def is_linear(module: nn.Module) -> bool:
    """Whether it computes `x W^T + b` with its `weight` `[out, in]`."""
    if not isinstance(module, nn.Linear):
        return False
    kind: Any = type(module)
    return kind.forward is nn.Linear.forward or _computes_linear(kind)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, `x W + b` with `weight` `[in, out]`."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.dim() == 2


def is_matrix(module: nn.Module) -> bool:
    """Whether it is one of them."""
    return is_linear(module) or is_conv1d(module)


def sides(module: nn.Module) -> tuple[int, int] | None:
    """(outputs, inputs); None of other modules."""
    if not is_matrix(module):
        return None
    outputs, inputs = get_matrix(module).shape
    return outputs, inputs


def get_matrix(module: nn.Module) -> torch.Tensor:
    """The weight as `[out, in]`: it shares its memory with the module's."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.data.T if is_conv1d(module) else weight.data


def set_matrix(module: nn.Module, matrix: torch.Tensor) -> None:
    """Make `matrix` `[out, in]` the weight, in its dtype and on its device."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    weight.data = matrix.T.contiguous() if is_conv1d(module) else matrix


@functools.cache
def _computes_linear(kind: type[nn.Linear]) -> bool:
    """Whether a small layer of a class with a `forward` of its own (Falcon's) computes what nn.Linear does."""
    try:
        small = kind(3, 5, bias=True, device="cpu", dtype=torch.float32)
        rows = torch.linspace(-1, 1, 6, device="cpu").reshape(2, 3)
        with torch.no_grad():
            small.weight.copy_(torch.linspace(-2, 3, 15, device="cpu").reshape(5, 3))
            small.bias.copy_(torch.linspace(0, 1, 5, device="cpu"))
            return bool(torch.allclose(small(rows), functional.linear(rows, small.weight, small.bias), atol=1e-5))
    except Exception:  # a class with other arguments, or one that wants more than it is given
        return False
