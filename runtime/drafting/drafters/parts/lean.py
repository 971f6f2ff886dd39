"""Linear layers of drafts as they are computed fastest: on CPUs in 8 bits by the kernels in C, a fourth of the memory that is read."""

from __future__ import annotations

import torch
from torch import nn

from runtime import formats
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import CompressedWeight, Scheme, WeightScheme
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear

_GRID = WeightScheme(8, "int", True, "channel")
_MOST = 127  # of the codes; symmetric, so that -128 is never used


def compute_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """What drafts are computed in: float32 on CPUs, as the decoder in C does, and the target's dtype elsewhere."""
    return torch.float32 if device.type == "cpu" else stored


def lean_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A layer `[..., in]` to `[..., out]` in `dtype`.

    On CPUs with a C compiler each row of the weight is rounded to 255 values. What a draft proposes hardly changes, what is written does
    not at all, and reading the weight is what a draft's time goes to.

    Args:
        weight: `[out, in]`. bias: `[out]`.
    """
    if device.type == "cpu" and library.load() is not None:
        return _rounded(weight, bias, dtype)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().to(device, dtype), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(device, dtype), requires_grad=False)
    return layer


def make_lean(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the plain linear layers inside a module, and move everything else to `dtype` and `device`."""
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            bias = None if child.bias is None else child.bias
            setattr(module.get_submodule(parent), leaf, lean_linear(child.weight, bias, dtype, device))
    for child in module.modules():
        if not isinstance(child, CompressedLinear):
            for parameter in child.parameters(recurse=False):
                parameter.data = parameter.data.to(device, dtype)
                parameter.requires_grad_(False)
            for buffer in child.buffers(recurse=False):
                buffer.data = buffer.data.to(device)


def nbytes(module: nn.Module) -> int:
    """Memory of all parameters and buffers."""
    return sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers()))


def _rounded(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> CompressedLinear:
    dense = weight.detach().float()
    scale = (dense.abs().amax(1, keepdim=True) / _MOST).clamp_min(torch.finfo(torch.float32).tiny)
    scheme, shape = Scheme(_GRID), (dense.shape[0], dense.shape[1])
    codes = (dense / scale).round().clamp(-_MOST, _MOST).to(torch.int8)
    storage = formats.choose(scheme, shape)
    tensors = storage.pack(CompressedWeight(codes, scale.to(dtype), None, None, scheme, dtype))
    layer = CompressedLinear.from_tensors(ModuleEntry(scheme, storage.name), shape, tensors, bias, dtype)
    layer.prepare()
    return layer
