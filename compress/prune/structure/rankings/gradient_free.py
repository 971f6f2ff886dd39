"""Gradient-free ranking from weights and unlabeled text: how representative a channel is of the others, times its mean activation."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod, View

_MOST_STEPS = 200


class GradientFreeConfig(StructureConfig):
    """Remove the channels that are least representative of all and least active (R2D2).

    Representative: kernelized convex masking finds, for each channel's outgoing weights in the space of a Gaussian kernel, the convex
    combination of all that comes nearest; the weight of a channel in its own is its rank. Active: size of its value over text.
    """

    method: Literal["gradient_free"] = Field("gradient_free", description="Name of the method.")
    width: float | None = Field(
        1.0,
        gt=0,
        description="Of the Gaussian kernel, in Euclidean distances of outgoing weights; none: the median distance of the layer.",
    )
    activity: Literal["rms", "mean"] = Field(
        "rms",
        description="How the size of a channel's value is taken over text: its root mean square, or its mean as in the paper.",
    )
    convergence: float = Field(
        0.01, gt=0, lt=1, description="Relative change of the convex combinations that ends the search."
    )


def rank(view: View, config: GradientFreeConfig) -> torch.Tensor:
    """`[units]`: sums over the unit's channels of representative rank times size, the latter as a share of the largest."""
    representative, steps = convex_masking(view.columns.T, config.width, config.convergence)
    view.notes["steps"] = float(steps)
    mean, square = view.statistics.abs_mean, view.statistics.square_mean
    active = (mean if config.activity == "mean" else square.sqrt()).to(representative)
    score = representative * active / active.max().clamp_min(torch.finfo(torch.float32).tiny)
    return score.view(view.count, view.each).sum(1)


def convex_masking(filters: torch.Tensor, width: float | None, convergence: float) -> tuple[torch.Tensor, int]:
    """Kernelized convex masking: how much of each filter's best convex combination in the kernel's space is the filter itself.

    Args:
        filters: float32 `[n, d]`.

    Returns:
        `[n]`, and the steps that it took. Multiplicative updates of non-negative coefficients, `C * sqrt(K / (K C))`, from all equal.
    """
    distances = torch.cdist(filters, filters)
    scale = float(distances.median()) if width is None else width
    kernel = torch.exp(-(distances / max(scale, torch.finfo(torch.float32).tiny)).square())
    masks = torch.full_like(kernel, 1 / len(filters))
    change, steps = 1.0, 0
    while change >= convergence and steps < _MOST_STEPS:
        following = masks * (kernel / (kernel @ masks).clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
        change = float((following - masks).abs().sum() / masks.sum())
        masks, steps = following, steps + 1
    return masks.diagonal().clone(), steps


METHOD = StructureMethod(
    GradientFreeConfig,
    rank,
    summary="removes the channels that stand for few others and say little, from weights and unlabeled text",
    paper="Nova et al., Gradient-Free Structured Pruning with Unlabeled Data, 2023, arXiv 2303.04185",
    removes={"ffn", "heads"},
    needs={"ranges"},
    pairwise=True,
)
