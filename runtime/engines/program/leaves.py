"""Modules with weights that operations know: linear layers, norms, embeddings. What else has weights is unknown."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from runtime.engines.program.joined import Part
from runtime.engines.program.operations import NormWeights, UnknownError
from runtime.layers.compressed_linear import CompressedEmbedding, CompressedLinear
from runtime.modeling.linear_modules import is_matrix, sides

Kind = Literal["linear", "norm", "embedding"]


def kind_of(module: nn.Module) -> Kind | None:
    """What operation computes it; None: none does, or it is no leaf."""
    if isinstance(module, CompressedLinear | Part) or is_matrix(module):
        return "linear"
    if isinstance(module, nn.Embedding | CompressedEmbedding):
        return "embedding"
    return "norm" if _is_norm(module) else None


def _is_norm(module: nn.Module) -> bool:
    children = list(module.children())
    if children:  # a norm a head
        inner = list(children[0].children())
        return len(children) == 1 and bool(inner) and all(_is_norm(each) for each in inner) and "Norm" in _name(module)
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return "Norm" in _name(module)
    return (
        own.keys() <= {"weight", "bias"} and all(each.dim() <= 2 for each in own.values()) and "Norm" in _name(module)
    )


def _name(module: nn.Module) -> str:
    return type(module).__name__


def shape_of(name: str, module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    if isinstance(module, CompressedLinear | Part):
        return int(module.out_features), int(module.in_features)
    found = sides(module)
    if found is None:
        raise UnknownError(f"{name}, a {_name(module)}, is no matrix")
    return found


def norm_parameters(module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias as they lie in it, `[width]`, or `[heads, width]` where each head has its own; None: it has none."""
    inner: Any = list(module.modules())
    parts = [each for each in inner if not list(each.children())]
    found: list[torch.Tensor | None] = []
    for name in ("weight", "bias"):
        own = [each for each in (getattr(part, name, None) for part in parts) if each is not None]
        whole = len(own) == len(parts)
        found.append(
            None if not whole else own[0].detach() if len(own) == 1 else torch.stack([x.detach() for x in own])
        )
    return found[0], found[1]


def read_norm(name: str, module: nn.Module) -> NormWeights:
    """What a norm computes, seen in numbers: a copy of it with random weights is given random rows.

    Raises:
        UnknownError: neither RMS nor layer norm.
    """
    weight, bias = norm_parameters(module)
    inner: Any = next(each for each in module.modules() if not list(each.children()))
    eps = [
        getattr(inner, each)
        for each in ("eps", "variance_epsilon", "epsilon")
        if isinstance(getattr(inner, each, None), float)
    ]
    width = weight.shape[-1] if weight is not None else getattr(inner, "normalized_shape", (48,))[-1]
    key = (type(inner), width, weight is None, bias is None, *eps[:1])
    if key not in _known:
        _known[key] = _probe(inner, width, eps[0] if eps else 0.0)
    found = _known[key]
    if found is None:
        raise UnknownError(f"{name}, a {_name(module)}, is neither an RMS norm nor a layer norm")
    return NormWeights(name, *found)


_known: dict[tuple[Any, ...], tuple[bool, float, float] | None] = {}


def _probe(inner: nn.Module, width: int, eps: float) -> tuple[bool, float, float] | None:
    """(layer, shift, eps) of a norm of one set of weights."""
    import copy

    generator = torch.Generator().manual_seed(1)
    twin = copy.deepcopy(inner).to_empty(device="cpu").float()
    for parameter in twin.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    weight, bias = norm_parameters(twin)
    x = (
        torch.randn(5, width, generator=generator) * torch.tensor([1e-3, 0.1, 1.0, 1.0, 30.0])[:, None]
        + 0.3 * torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0])[:, None]
    )
    shaped = x if weight is None or weight.dim() == 1 else x[:, None].expand(-1, weight.shape[0], -1)
    with torch.no_grad():
        seen = twin(shaped)
        for layer in (False, True):
            for shift in (0.0, 1.0):
                own = NormWeights("", layer, shift, eps)
                if torch.allclose(apply_norm(shaped, own, weight, bias), seen, rtol=1e-4, atol=1e-5):
                    return layer, shift, eps
    return None


def apply_norm(
    x: torch.Tensor, norm: NormWeights, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The norm of rows `[..., width]` in float32, with `norm_parameters`."""
    if norm.layer:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    x = x if weight is None else x * (weight.float() + norm.shift)
    return x if bias is None else x + bias.float()
