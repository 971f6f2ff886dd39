"""Parametrizations of linear weights in training: a low-rank change, a mask, a quantization grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from compress.quantize.grid import Grid
from compress.quantize.weight_constraint import WeightConstraint

_NEARLY = 0.45  # of a step


@dataclass(frozen=True)
class Adapter:
    """A low-rank change: its rank and scale."""

    rank: int
    scale: float


class Changed(nn.Module):
    """The weight `[out, in]` plus scale times B A, A `[rank, in]` random and B `[out, rank]` zero at first; the weight itself is frozen."""

    def __init__(self, shape: tuple[int, int], adapter: Adapter, generator: torch.Generator) -> None:
        super().__init__()
        out, columns = shape
        rank = min(adapter.rank, out, columns)
        self.scale = adapter.scale
        self.down = nn.Parameter(torch.randn(rank, columns, generator=generator) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(out, rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight plus the scaled low-rank product, `[out, in]`."""
        return weight + self.scale * (self.up @ self.down)


class Masked(nn.Module):
    """Zero where the mask says so; no gradient gets there, so that what is there never changes."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight with its pruned entries zero."""
        return weight * cast(torch.Tensor, self.mask)


class OnGrid(nn.Module):
    """The nearest numbers of a grid; the gradient goes through as if nothing were rounded, but for what lies outside of the grid's range
    (straight-through estimator, Bengio et al., arXiv 1308.3432). A removed weight is zero, which every grid has."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.scheme = grid.scheme
        self.register_buffer("scale", grid.scale, persistent=False)
        self.register_buffer("zero", grid.zero, persistent=False)

    @property
    def grid(self) -> Grid:
        """The grid with its present scales and zero points."""
        return Grid(self.scheme, cast(torch.Tensor, self.scale), cast("torch.Tensor | None", self.zero))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight rounded to the grid; gradients pass straight through where rounding does not clip."""
        grid, values = self.grid, weight.detach()
        rounded = grid.values(grid.codes(values.clone()))
        if self.scheme.type == "float":
            inside = torch.ones_like(values, dtype=torch.bool)
        else:
            inside = (values - rounded).abs() <= 0.5001 * grid.expand(values.shape[1])[0].abs()
        return _Through.apply(weight, rounded, inside, values > rounded)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, weight: torch.Tensor, rounded: torch.Tensor, inside: torch.Tensor, above: torch.Tensor
    ) -> torch.Tensor:
        context.save_for_backward(inside, above)
        return rounded

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inside, above = context.saved_tensors
        # A step goes against the gradient. A weight beyond the range may come back, and is not pushed further.
        further = ~inside & ((above & (gradient < 0)) | (~above & (gradient > 0)))
        return gradient.masked_fill(further, 0.0), None, None, None


def constrain(
    module: nn.Module,
    constraints: dict[str, WeightConstraint],
    adapter: Adapter | None = None,
    targets: frozenset[str] = frozenset(),
    seed: int = 0,
) -> None:
    """Parametrize the weights of linear layers by their constraints.

    Args:
        module: of the whole model, float32.
        constraints: {layer: its mask and grid}.
        adapter: of each of the layers `targets`, whose own weights are then frozen; None: weights are trained themselves.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, layer in list(module.named_modules()):
        own = constraints.get(name)
        if own is None and (adapter is None or name not in targets):
            continue
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        device = weight.device
        if adapter is not None and name in targets:
            weight.requires_grad_(False)
            shape = (int(weight.shape[0]), int(weight.shape[1]))
            parametrize.register_parametrization(layer, "weight", Changed(shape, adapter, generator).to(device))
        if own is not None and own.mask is not None:
            parametrize.register_parametrization(layer, "weight", Masked(own.mask.to(device)))
        grid = None if own is None else own.grid
        if grid is not None:
            parametrize.register_parametrization(layer, "weight", OnGrid(grid).to(device))


def between_codes(weight: torch.Tensor, source: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Values that round to `weight` on the grid, as near as possible to those that it was rounded from.

    In the middle of its code a weight would have to go half a step before anything happens. Where a solver, or a scale that was folded
    into a neighbour, has moved it by more than a step, the weight before says nothing of where it should go, and it stays where it is.

    Args:
        weight: `[out, in]`, on the grid. source: the same before it was quantized.
    """
    step = grid.expand(weight.shape[1])[0].abs()
    rest = source.to(weight) - weight
    inside = torch.maximum(torch.minimum(rest, _NEARLY * step), -_NEARLY * step)
    moved = weight + torch.where(rest.abs() <= step, inside, torch.zeros_like(rest))
    same = grid.codes(moved.clone()) == grid.codes(weight.clone())
    return torch.where(same, moved, weight)


def settle(module: nn.Module) -> None:
    """Replace every parametrized weight by its value."""
    for layer in list(module.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
