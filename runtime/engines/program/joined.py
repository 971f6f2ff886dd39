"""Linear layers of one input as one layer: their rows one after another, in the modules of a model that goes on working."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runtime import formats
from runtime import kernels as kernel_table
from runtime.layers.compressed_linear import CompressedLinear


class Part(nn.Module):
    """Some rows of a joined layer, in the place of the layer that they were: the model's own forward pass goes on working.

    It computes the whole product and cuts its rows out; whoever wants speed calls the joined layer.
    """

    def __init__(self, whole: nn.Module, start: int, stop: int, columns: int) -> None:
        super().__init__()
        self._whole = (whole,)  # not as a submodule: the parent has it under a name of its own
        self.start, self.stop = start, stop
        self.in_features, self.out_features = columns, stop - start

    @property
    def whole(self) -> nn.Module:
        """The joined layer."""
        return self._whole[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This part's columns of the joint layer's output."""
        return self.whole(x)[..., self.start : self.stop]


class Joined:
    """Layers of one input: called, the results of all, in few products.

    Attributes:
        layers: what is called: one layer, or the given ones where they cannot be joined.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self._sizes = [int(layer.out_features) for layer in layers]  # type: ignore[arg-type]

    def whole(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One tensor with all results side by side, or one a layer."""
        return [layer(x) for layer in self.layers]

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        found = self.whole(x)
        return found[0].split(self._sizes, dim=-1) if len(found) == 1 else found

    @classmethod
    def of(cls, parent: nn.Module, names: Sequence[str], name: str) -> Joined:
        """Join layers of `parent` as far as possible; a compressed joined layer becomes `parent.name`.

        Memory of weights is not doubled for longer than one such group: dense weights become views of the joined one,
        compressed layers are replaced (see `Part`).
        """
        layers: list[nn.Module] = [getattr(parent, each) for each in names]
        joined = cls(layers)
        if isinstance(layers[0], Part):  # done by an engine before this one
            joined.layers = [layers[0].whole]
        elif (dense := join_dense(layers)) is not None:
            joined.layers = [dense]
        elif (whole := _join_compressed(layers)) is not None:
            joined.layers = [whole]
            hand_over(parent, names, name, whole)
        return joined


def hand_over(parent: nn.Module, names: Sequence[str], name: str, whole: nn.Module) -> None:
    """Make `whole` the layer `parent.name`, and the layers `names`, whose rows it has, parts of it."""
    start = 0
    for each in names:
        layer: Any = getattr(parent, each)
        setattr(parent, each, Part(whole, start, start + layer.out_features, layer.in_features))
        start += layer.out_features
    parent.add_module(name, whole)


def join_dense(layers: Sequence[nn.Module]) -> nn.Linear | None:
    """Plain layers as one, whose rows their weights become views of; None where they differ."""
    linear = [layer for layer in layers if type(layer) is nn.Linear and not has_hooks(layer)]
    if len(linear) < len(layers) or len({(x.weight.dtype, x.weight.device, x.in_features) for x in linear}) > 1:
        return None
    whole = nn.Linear(linear[0].in_features, sum(x.out_features for x in linear), bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat([x.weight.detach() for x in linear]), requires_grad=False)
    bias = _bias(linear, whole.weight.dtype)
    if bias is not None:
        whole.bias = nn.Parameter(bias, requires_grad=False)
    start = 0
    for x in linear:
        x.weight = nn.Parameter(whole.weight.detach()[start : start + x.out_features], requires_grad=False)
        start += x.out_features
    return whole


def _bias(layers: Sequence[nn.Linear | CompressedLinear], dtype: torch.dtype) -> torch.Tensor | None:
    if all(x.bias is None for x in layers):
        return None
    device = next(x.bias.device for x in layers if x.bias is not None)
    none = torch.zeros(0, dtype=dtype, device=device)
    return torch.cat([none.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in layers])


def _join_compressed(layers: Sequence[nn.Module]) -> CompressedLinear | None:
    """The layers as one, laid out anew for their kernels; None where they are not `alike`, or other kernels would fit the whole."""
    linear = alike(layers)
    if linear is None:
        return None
    first = linear[0]
    assert first.choice is not None
    shape = (sum(x.out_features for x in linear), first.in_features)
    choice = kernel_table.find(kernel_table.Layer(first.entry, shape, first.dtype, first.device), first._wanted)
    if choice.decode.layout != first.choice.decode.layout:
        return None
    weights = [x.compressed_weight() for x in linear]
    rows: dict[str, Any] = {}
    for name in ("values", "scale", "zero_point", "mask"):
        if getattr(weights[0], name) is not None:
            rows[name] = torch.cat([getattr(weight, name) for weight in weights])
    representation = first.entry.scheme.weights
    if representation is not None and weights[0].own:
        rows["own"] = representation.join_rows([weight.own for weight in weights])
    tensors = formats.get(first.entry.format).pack(replace(weights[0], dtype=first.stored_dtype, **rows))
    whole = CompressedLinear.from_tensors(first.entry, shape, tensors, _bias(linear, first.dtype), first.stored_dtype)
    whole.dtype = first.dtype
    whole.prepare(first._wanted, choice)
    return whole


def empty_whole(layers: Sequence[CompressedLinear]) -> CompressedLinear:
    """A layer with the rows of layers that are `alike`, without its tensors."""
    first, bias = layers[0], any(x.bias is not None for x in layers)
    shape = (sum(x.out_features for x in layers), first.in_features)
    whole = CompressedLinear(first.entry, shape, bias, first.stored_dtype)
    whole.dtype, whole.choice, whole._wanted = first.dtype, first.choice, first._wanted
    return whole


def has_hooks(layer: nn.Module) -> bool:
    """Whether someone watches or changes what goes into a layer or comes out of it."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def alike(layers: Sequence[nn.Module]) -> list[CompressedLinear] | None:
    """The layers, if they are compressed alike, row by row, and have kernels, so that they may be joined; None otherwise."""
    linear = [layer for layer in layers if type(layer) is CompressedLinear and not has_hooks(layer)]
    first = linear[0] if linear else None
    if first is None or len(linear) < len(layers) or first.choice is None or first.entry.count is not None:
        return None
    same = {(x.entry, x.in_features, x.dtype, x.stored_dtype, x.device, x.choice, x._wanted) for x in linear}
    if len(same) > 1 or any(name.startswith("input_") for name in first._specs):
        return None
    weights, grid = first.entry.scheme.weights, first.entry.scheme.grid
    if grid is not None:
        by_row = all(grid.parameter_shape(x.shape)[0] == x.out_features for x in linear)
    else:
        # A part that is computed alone computes the whole: not where that dequantizes it at every call.
        by_row = weights is None or (weights.row_by_row and first.choice.decode is not kernel_table.REFERENCE)
    return linear if by_row else None
