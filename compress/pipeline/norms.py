"""Norms over the hidden state: which modules are norms, what they do with their weight, and what fewer dimensions change of them.

A norm divides by a root mean square (or standard deviation) over all dimensions. Over fewer it divides by another one, so its weight is
multiplied by the ratio of the two, as calibration text shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from compress.prune.structure.couplings import Slices, input_dim
from runtime.errors import RequestError

_CLOSE = 1e-3


@dataclass(frozen=True)
class Norm:
    """A module that divides its input by its size.

    Attributes:
        name: of the module.
        offset: what it adds to its weight before it multiplies with it: 1 in Gemma's, else 0.
        centred: whether it takes the mean away first.
    """

    name: str
    offset: float
    centred: bool

    def scaled(self, weight: torch.Tensor, factor: float) -> torch.Tensor:
        """The weight with which its output is `factor` times what it was, in the weight's dtype."""
        return ((weight.float() + self.offset) * factor - self.offset).to(weight.dtype)

    def shares(self, x: torch.Tensor) -> torch.Tensor:
        """Of inputs `[tokens, dimensions]` the square of each dimension over the mean square of all, mean over tokens: float64
        `[dimensions]`. Tokens of zeros are left out."""
        x = x.double()
        if self.centred:
            x = x - x.mean(1, keepdim=True)
        squares = x.square()
        whole = squares.mean(1, keepdim=True)
        return torch.where(whole > 0, squares / whole.clamp_min(1e-300), 0.0).sum(0)


def find_norms(model: nn.Module, slices: Iterable[Slices]) -> dict[str, Norm]:
    """The norms over the units of `slices` (dimensions of the hidden state), by name.

    What they do is tried: output that stays the same when the input grows makes a norm. Other vectors (scales of a layer) are none.

    Raises:
        RequestError: a norm that neither multiplies by its weight nor by one plus it.
    """
    found = {}
    for part in slices:
        name, _, leaf = part.name.rpartition(".")
        module = model.get_submodule(name)
        if leaf != "weight" or input_dim(module) is not None or isinstance(module, nn.Embedding):
            continue
        weight = module._parameters["weight"]
        assert weight is not None
        if weight.dim() == 1:
            norm = _tried(module, name, len(weight))
            if norm is not None:
                found[name] = norm
    return found


@torch.no_grad()
def _tried(module: nn.Module, name: str, width: int) -> Norm | None:
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    x = 10 * torch.randn(4, 1, width, generator=torch.Generator().manual_seed(0))

    def given(weight: float, value: torch.Tensor) -> torch.Tensor:
        for key, parameter in trial.named_parameters():
            parameter.fill_(weight if key == "weight" else 0.0)
        result = trial(value)
        assert isinstance(result, torch.Tensor)
        return result

    try:
        one, more = given(1.0, x), given(1.0, 4 * x)
    except (TypeError, RuntimeError, ValueError):  # it takes more than hidden states
        return None
    if one.shape != x.shape or not _alike(more, one):
        return None
    none = given(0.0, x)
    offset = float((none * (one - none)).sum() / (one - none).square().sum().clamp_min(1e-12))
    if min(abs(offset), abs(offset - 1)) > _CLOSE:
        raise RequestError(f"{name} ({type(module).__name__}) multiplies neither by its weight nor by one plus it")
    return Norm(name, float(round(offset)), _alike(given(1.0, x + 10), one))


def _alike(value: torch.Tensor, reference: torch.Tensor) -> bool:
    return float((value - reference).norm()) <= _CLOSE * float(reference.norm())


def gain(shares: torch.Tensor, kept: torch.Tensor) -> float:
    """What a norm's output must be multiplied by when only these dimensions are there: the root mean square over them by that over all.

    Args:
        shares: mean over tokens of `Norm.shares`, `[dimensions]`; zeros where nothing was seen.
    """
    if not bool(shares.any()):
        return 1.0
    return float(shares[kept].mean().sqrt())
