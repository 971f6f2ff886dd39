"""Inputs of compressed layers as they are: rounding of activations switched off, for all tokens or for those that begin each row."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeGuard

import torch
from torch import nn

from runtime.errors import RequestError
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.experts import Experts


def input_prefix(module: nn.Module) -> tuple[int, ...]:
    """Token ids behind which the static input grids of a model were calibrated (`ActivationScheme.prefix`); empty: none."""
    schemes = (each.entry.scheme.activations for each in module.modules() if isinstance(each, CompressedLinear))
    return next((scheme.prefix for scheme in schemes if scheme is not None and scheme.prefix), ())


def behind(tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Token ids `[n, s]` with the prefix `tokens` before each row."""
    return torch.cat([rows.new_tensor(list(tokens)).expand(len(rows), -1), rows], 1)


@contextmanager
def unrounded(module: nn.Module, tokens: int | None = None) -> Iterator[None]:
    """While active, layers inside `module` that round their inputs multiply by them as they are.

    Args:
        tokens: only the first so many of each row of an input `[rows, n, in]`; None: all, whatever the shape.

    Raises:
        RequestError: with `tokens`, on a forward pass whose layers are given tokens out of their rows (routed experts).
    """
    with ExitStack() as stack:
        for each in module.modules():
            if _rounds(each):
                each.__dict__["compute"] = functools.partial(_compute, each, tokens)
                stack.callback(each.__dict__.pop, "compute")
            elif isinstance(each, Experts) and any(map(_rounds, each.modules())):
                stack.callback(setattr, each, "compute", each.compute)
                each.compute = None  # so that each expert's layers are asked themselves
        yield


def _rounds(module: nn.Module) -> TypeGuard[CompressedLinear]:
    return isinstance(module, CompressedLinear) and module.entry.scheme.activations is not None


def _compute(layer: CompressedLinear, tokens: int | None, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`CompressedLinear.compute`."""
    if tokens is None:
        own = None if bias is None else bias.to(layer.dtype)
        return nn.functional.linear(x.to(layer.dtype), layer.dequantize(), own).to(x.dtype)
    if x.dim() != 3:
        text = "prefix tokens cannot be told from others in layers that are given tokens out of their rows"
        raise RequestError(f"static activations: {text}; make the activations dynamic")
    first = _compute(layer, None, x[:, :tokens], bias)
    rest = x[:, tokens:]
    return first if not rest.shape[1] else torch.cat([first, CompressedLinear.compute(layer, rest, bias)], 1)
