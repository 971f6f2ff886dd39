"""Routed experts of a layer as one tensor a projection, for kernels that compute all of them at once.

The modules go on working: their weights become views of these tensors, and packed gate and up projections parts of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runtime.engines.program.joined import Part, alike, empty_whole, hand_over, has_hooks
from runtime.formats.checks import Tensors
from runtime.kernels.triton.layout import Stack
from runtime.kernels.triton.linear import WeightOnlyTriton
from runtime.layers.compressed_linear import CompressedLinear
from runtime.layers.compressed_module import PREPARED
from runtime.modeling.experts import Experts

_GATE_UP, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
_JOINED = "gate_up_proj"  # of an expert
_READ = {"words", "scale", "zero_point"}  # what products read of packed weights


@dataclass(frozen=True)
class Stacks:
    """Weights of all experts: `gate_up` `(2 * inner, hidden)`, the gate's rows first, and `down` `(hidden, inner)`."""

    gate_up: Stack
    down: Stack


def why_not(module: nn.Module, dtype: torch.dtype) -> str | None:
    """The reason why the experts of a module cannot be stacked, for rows in `dtype`; None when they can.

    Args:
        module: holds experts with a gate and without biases, in one as `[experts, out, in]`, or one by one.
    """
    if not isinstance(module, Experts):
        others = {parameter.dtype for parameter in module.parameters()} - {dtype}
        if not others:
            return None
        return f"its experts are in {min(others, key=str)}, its norms in {dtype}".replace("torch.", "")
    for names in (_GATE_UP, _DOWN):
        layers = [layer for each in _layers(module, names) for layer in each]
        reason = None if _are_dense(layers, dtype) else _why_not_packed(layers, dtype)
        if reason is not None:
            return f"{names[-1]} of its experts: {reason}"
    return None


def _why_not_packed(layers: Sequence[nn.Module], dtype: torch.dtype) -> str | None:
    first: Any = layers[0]
    if any(not isinstance(layer, CompressedLinear) for layer in layers):
        return f"layers are of different kinds, or no linear ones in {str(dtype).removeprefix('torch.')}"
    if not isinstance(first.kernel, WeightOnlyTriton):
        return f"computed by {first.kernel_name}, and only integer weights with unquantized activations are computed together"
    if first.entry.scheme.transform is not None:
        return "inputs are transformed"
    if not _READ.issuperset(first._tensors()):
        return f"format {first.entry.format} keeps more than codes and scales"
    if alike(layers) is None:
        return "compressed in different ways, or with one scale for several rows"
    return None if first.dtype == dtype else f"computed in {first.dtype}, not in {dtype}".replace("torch.", "")


def stack_experts(module: nn.Module) -> Stacks:
    """The experts of a module of which `why_not` says nothing. Memory is not doubled for longer than one projection takes."""
    if not isinstance(module, Experts):
        wide, down = (module.get_parameter(name).detach() for name in ("gate_up_proj", "down_proj"))
        return Stacks(Stack.dense(wide), Stack.dense(down))
    return Stacks(_stack(module, _GATE_UP), _stack(module, _DOWN))


def blank_stacks(module: nn.Module) -> Stacks:
    """What `stack_experts` would make, on meta; the module stays as it is."""
    if not isinstance(module, Experts):
        wide, down = (module.get_parameter(name).detach().to("meta") for name in ("gate_up_proj", "down_proj"))
        return Stacks(Stack.dense(wide), Stack.dense(down))
    return Stacks(_blank(module, _GATE_UP), _blank(module, _DOWN))


def _blank(module: Experts, names: Sequence[str]) -> Stack:
    layers: list[list[Any]] = _layers(module, names)
    own, count = layers[0], len(layers)

    def every(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        whole = torch.cat([tensor.detach().to("meta") for tensor in tensors], dim)
        return whole.expand(count, *whole.shape)

    if type(own[0]) is nn.Linear:
        return Stack.dense(every([layer.weight for layer in own], 0))
    held = [layer._tensors() for layer in own]
    return _packed(own[0], {name: every([each[name] for each in held], 1) for name in held[0]})


def _layers(module: Experts, names: Sequence[str]) -> list[list[nn.Module]]:
    """Layers of each expert; what was joined is one."""
    found = [[expert.get_submodule(name) for name in names] for expert in module.one_by_one()]
    return [[each[0].whole] if isinstance(each[0], Part) else each for each in found]


def _are_dense(layers: Sequence[nn.Module], dtype: torch.dtype) -> bool:
    return all(type(layer) is nn.Linear and layer.weight.dtype == dtype and not has_hooks(layer) for layer in layers)


def _stack(module: Experts, names: Sequence[str]) -> Stack:
    layers: list[list[Any]] = _layers(module, names)
    first = layers[0][0]
    if type(first) is nn.Linear:
        flat = [layer for each in layers for layer in each]
        every = together([layer.weight.detach() for layer in flat])
        for layer, weight in zip(flat, every, strict=True):
            layer.weight = nn.Parameter(weight, requires_grad=False)
        return Stack.dense(every.view(len(layers), -1, every.shape[-1]))
    held = [[layer._tensors() for layer in each] for each in layers]
    tensors = {}
    for name in held[0][0]:
        sides = [together([each[side][name] for each in held]) for side in range(len(held[0]))]
        tensors[name] = sides[0] if len(sides) == 1 else torch.cat(sides, dim=2)
    for number, own in enumerate(layers):
        whole = own[0]
        if len(own) > 1:
            whole = empty_whole(own)
            whole._replace({})
            hand_over(module.one_by_one()[number], names, _JOINED, whole)
        for name, tensor in tensors.items():
            whole.register_buffer(PREPARED + name, tensor[number], persistent=False)
    return _packed(first, tensors)


def _packed(first: CompressedLinear, tensors: Tensors) -> Stack:
    """Of tensors `[experts, ...]`, compressed as a layer is."""
    kernel = first.kernel
    assert isinstance(kernel, WeightOnlyTriton)
    shape = (tensors["words"].shape[2], first.in_features)
    return Stack(tensors["words"], tensors["scale"], tensors.get("zero_point"), shape, first.layer.group, kernel.field)


def together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.stack`, but of tensors that lie one after another the memory itself."""
    first = tensors[0]
    if first.device.type == "meta" or any(
        each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        or each.storage_offset() != first.storage_offset() + number * first.numel()
        or not each.is_contiguous()
        for number, each in enumerate(tensors)
    ):
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
