"""Routed experts of a layer computed together in C, in the place of a Python loop over their linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runtime.kernels.cpu import experts as c_experts
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import IntegerKernel
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.experts import Experts, gate_of


class CLinear:
    """Linear layers as the C library reads them.

    Attributes:
        keep: tensors that the structures point to. digits: of the activations that integer layers take.
    """

    def __init__(self) -> None:
        self.keep: list[Any] = []
        self.digits: set[int] = set()

    def of(self, module: nn.Module) -> library.Linear | str:
        """The layer, a dense one as it lies in memory; or the reason why C does not compute it."""
        if isinstance(module, CompressedLinear):
            kernel = module.kernel
            if not isinstance(kernel, IntegerKernel):
                return f"kernel {module.kernel_name} of one of its layers is not in C"
            self.digits.add(kernel.digits(module.layer))
            tensors, bias = module._tensors(), _float(module.bias)
            self.keep.append((tensors, bias))
            return kernel.panels.linear(tensors, module.layer, bias)
        if (
            type(module) is not nn.Linear
            or module.weight.dtype not in library.TYPES
            or not module.weight.is_contiguous()
        ):
            return f"one of its layers is a {type(module).__name__}"
        return self.dense(module.weight, module.bias)

    def dense(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> library.Linear:
        """A weight `[out, in]` of one of `library.TYPES`, contiguous."""
        bias = _float(bias)
        self.keep.append((weight, bias))
        return library.Linear(
            kind=library.KINDS["dense"],
            scale_type=library.TYPES[weight.dtype],
            rows=weight.shape[0],
            columns=weight.shape[1],
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
        )


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


class NativeExperts:
    """`Experts.compute`: what the experts of a layer make of its tokens, or None where C does not do it.

    It is asked at every call. Whoever watches an expert's layers, trains them or puts others in their place gets the Python loop; where
    only their tensors are others (streamed weights), C is shown the new ones.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[dict[str, Any], str, nn.Module, torch.Tensor | None]] = []
        self._hooks: list[Any] = []
        self._ready: tuple[c_experts.Experts, CLinear, torch.dtype] | None = None

    def __deepcopy__(self, memo: Any) -> NativeExperts:
        return NativeExperts()

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeExperts, ()

    def __call__(
        self, module: Experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """Arguments and result as of `Experts.forward`."""
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad or _trains(module)):
            self._seen = []  # biases may be others the next time
            return None
        if module.everyone or module.separate or x.device.type != "cpu":
            return None
        if not self._seen or not all(store.get(name) is x and _weight(x) is w for store, name, x, w in self._seen):
            self._ready = self._read(module)
        if self._ready is None or self._ready[2] != x.dtype or any(self._hooks):
            return None
        return c_experts.run(self._ready[0], x, index, weights)

    def _read(self, module: Experts) -> tuple[c_experts.Experts, CLinear, torch.dtype] | None:
        """The experts in C's structures, what these point to, and the dtype of their rows; None where C does not compute them."""
        layout, reader = module.layout, CLinear()
        experts = [expert._modules for expert in module.one_by_one()]
        layers: list[Any] = [expert[name] for expert in experts for name in layout.projections]
        self._seen = [
            (store, name, store[name], _weight(store[name])) for store in experts for name in layout.projections
        ]  # type: ignore[arg-type,misc]
        self._hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        gate = gate_of(module)
        dtypes = {layer.dtype for layer in layers if isinstance(layer, CompressedLinear)}
        if gate is None or len(dtypes) != 1 or any("forward" in layer.__dict__ for layer in layers):
            return None
        found = [reader.of(layer) for layer in layers]
        linear = [layer for layer in found if isinstance(layer, library.Linear)]
        if len(linear) < len(found) or len(reader.digits) != 1:
            return None
        count = len(layout.projections)
        rows = [linear[i : i + count] for i in range(0, len(linear), count)]
        made = c_experts.experts_of(
            [(row[0] if layout.gate else None, row[-2], row[-1]) for row in rows],
            reader.digits.pop(), gate.kind, gate.alpha, gate.limit,
        )  # fmt: skip
        return None if isinstance(made, str) else (made, reader, dtypes.pop())


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _weight(layer: nn.Module) -> torch.Tensor | None:
    """The tensor whose place in memory C is told."""
    buffers = layer._buffers
    return buffers.get("prepared_weight") if buffers else layer._parameters.get("weight")
