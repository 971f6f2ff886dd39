"""Routed experts of a layer computed together in C, in the place of a Python loop over their linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runtime.formats.input_transform import ORDER, matrices
from runtime.formats.representation import Tensors
from runtime.kernels.cpu import experts as c_experts
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import CKernel
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.experts import Experts, Gate, Layout, gate_of
from runtime.modeling.linear_modules import is_conv1d, is_matrix


class CLinears:
    """Linear layers as the C library reads them.

    Attributes:
        keep: tensors that the structures point to.
    """

    def __init__(self) -> None:
        self.keep: list[torch.Tensor] = []
        self._of_transforms: dict[bytes, torch.Tensor] = {}  # by their bytes

    def of(self, module: nn.Module, name: str) -> library.Linear | str:
        """The layer, a dense one as it lies in memory; or the reason why C does not compute it. `name` is what reasons call it."""
        if isinstance(module, CompressedLinear):
            kernel = module.kernel
            if not isinstance(kernel, CKernel):
                return f"kernel {module.kernel_name} of {name} is not in C"
            bias = None if module.bias is None else module.bias.detach().float()
            tensors = module._tensors()
            self.keep += [*tensors.values(), *([] if bias is None else [bias])]
            found = kernel.linear(tensors, module.layer, bias)
            if module.entry.scheme.transform is not None:
                found.basis = self._basis(tensors)
            return found
        if not is_matrix(module):
            return f"{name} is a {type(module).__name__}"
        return self.dense(rows_of(module), module._parameters.get("bias"), name)

    def dense(self, weight: torch.Tensor, bias: torch.Tensor | None, name: str) -> library.Linear | str:
        """A weight `[out, in]`, row after row in memory, and a bias `[out]`; or the reason why C does not compute it."""
        if weight.dtype not in library.TYPES:
            return f"{name} is in {weight.dtype}".replace("torch.", "")
        self.keep.append(weight)
        return library.Linear(
            kind=library.KINDS["dense"],
            weight_type=library.TYPES[weight.dtype],
            rows=weight.shape[0],
            columns=weight.shape[1],
            weight=weight.data_ptr(),
            bias=None if bias is None else self.vector(bias),
        )

    def _basis(self, tensors: Tensors) -> library.Basis:
        """The basis that an input transform's tensors make."""
        if ORDER in tensors:
            return library.Basis(order=self._shared(tensors[ORDER]))
        left, right = matrices(tensors)
        sizes = 1 if left is None else len(left), len(right)
        return library.Basis(*sizes, None if left is None else self._shared(left.float()), self._shared(right.float()))

    def _shared(self, tensor: torch.Tensor) -> int:
        """Address of a tensor, the same for equal ones: what layers of one input make of it is computed once."""
        own = tensor.detach().contiguous().clone()  # not in a file that streamed weights are read from
        return self._of_transforms.setdefault(own.numpy().tobytes(), own).data_ptr()

    def vector(self, weight: torch.Tensor) -> int:
        """Address of a weight in float32."""
        vector = weight.detach().float().contiguous()
        self.keep.append(vector)
        return vector.data_ptr()


def rows_of(module: Any) -> torch.Tensor:
    """Weight of a dense layer `[out, in]`, row after row in memory; from then on the module holds a view of this."""
    turned = is_conv1d(module)
    weight: torch.Tensor = module.weight.detach().t() if turned else module.weight.detach()
    if not weight.is_contiguous():
        weight = weight.contiguous()
        module.weight.data = weight.t() if turned else weight
    return weight


def read_experts(module: nn.Module, layout: Layout, gate: Gate, reader: CLinears, name: str) -> c_experts.Experts | str:
    """A module that holds experts, in one or one by one (children "0", "1", ...), as C reads it; or the reason why C does not compute it.

    Experts in one whose matrices lie the other way round, or whose gate's and up projection's rows take turns, are copied.
    """
    rows = []
    for number in range(layout.count):
        row = []
        for projection in layout.projections:
            if "0" in module._modules:
                found = reader.of(module.get_submodule(f"{number}.{projection}"), f"{name}.{number}.{projection}")
            else:
                weight, bias = (
                    layout.part(
                        projection, module.get_parameter(layout.home(projection, is_bias))[number].detach(), is_bias
                    )
                    if layout.bias or not is_bias
                    else None
                    for is_bias in (False, True)
                )
                assert weight is not None
                found = reader.dense(weight, bias, f"{name}.{projection}")
            if isinstance(found, str):
                return found
            if found.basis:
                return f"{name}.{projection} transforms its input, which C does not do for experts"
            row.append(found)
        rows.append((row[0] if layout.gate else None, row[-2], row[-1]))
    made = c_experts.experts_of(rows, gate.kind, gate.alpha, gate.limit)
    return f"{name}: {made}" if isinstance(made, str) else made


class NativeExperts:
    """`Experts.compute`: what the experts of a layer make of its tokens, or None where C does not do it.

    It is asked at every call. Whoever watches an expert's layers, trains them or puts others in their place gets the Python loop; where
    only their tensors are others (streamed weights), C is shown the new ones.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[dict[str, Any], str, nn.Module, torch.Tensor | None]] = []
        self._hooks: list[Any] = []
        self._ready: tuple[c_experts.Experts, CLinears, torch.dtype] | None = None

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

    def _read(self, module: Experts) -> tuple[c_experts.Experts, CLinears, torch.dtype] | None:
        """The experts in C's structures, what these point to, and the dtype of their rows; None where C does not compute them."""
        layout, reader = module.layout, CLinears()
        experts: list[dict[str, Any]] = [expert._modules for expert in module.one_by_one()]
        layers: list[Any] = [expert[name] for expert in experts for name in layout.projections]
        self._seen = [
            (store, name, store[name], _weight(store[name])) for store in experts for name in layout.projections
        ]
        self._hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        dtypes = {layer.dtype for layer in layers if isinstance(layer, CompressedLinear)}
        if len(dtypes) != 1 or any("forward" in layer.__dict__ for layer in layers):
            return None
        gate = gate_of(module)
        made = None if gate is None else read_experts(module, layout, gate, reader, "experts")
        return None if made is None or isinstance(made, str) else (made, reader, dtypes.pop())


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _weight(layer: nn.Module) -> torch.Tensor | None:
    """The tensor whose place in memory C is told."""
    buffers = layer._buffers
    return buffers.get("prepared_weight") if buffers else layer._parameters.get("weight")
