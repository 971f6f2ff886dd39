"""Allocation of sparsity to layers: pure functions from scores to sparsities that meet a global budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compress.core.statistics import Statistics
from runtime.errors import RequestError

#: How far a layer may lie from the target (the lambda of the OWL paper).
SPREAD = 0.08
#: A weight whose importance is this many times the layer's mean is an outlier (the M of the OWL paper).
OUTLIER = 5.0


def allocate(scores: Sequence[float], sizes: Sequence[int], target: float, spread: float = SPREAD) -> list[float]:
    """Sparsity of every layer: the higher its score, the fewer weights are removed.

    Args:
        scores: importance of each layer, any scale; equal scores give the target everywhere.
        sizes: weights of each layer.
        target: sparsity wanted over all weights, in [0, 1).
        spread: largest distance from the target.

    Returns:
        Sparsities in [0, 1), each within `spread` of the target; their mean weighted by size is the target.

    Raises:
        RequestError: lengths differ, or the target is out of range.
    """
    if len(scores) != len(sizes):
        raise RequestError(f"allocation: {len(scores)} scores for {len(sizes)} layers")
    if not 0 <= target < 1:
        raise RequestError(f"sparsity {target:g} is not possible: give a number from 0 up to, but not including, 1")
    if not scores:
        return []
    # Nothing may leave [0, 1): the room on the nearer side limits both.
    spread = min(spread, target, (1 - target) * 0.999)
    value = torch.tensor(scores, dtype=torch.float64)
    weight = torch.tensor(sizes, dtype=torch.float64)
    weight /= weight.sum()
    low, high = float(value.min()), float(value.max())
    if not high > low or spread <= 0:
        return [target] * len(scores)
    # Centre the removal (high score = negative), then shrink it until the farthest layer is `spread` away.
    removal = (high - value) / (high - low)
    removal -= (removal * weight).sum()
    removal *= spread / removal.abs().max()
    # Rounding may leave a layer with all its room used a hair below zero.
    return [max(0.0, float(x)) for x in target + removal]


def outlier_score(weights: Sequence[torch.Tensor], statistics: Sequence[Statistics]) -> float:
    """Layer-wise outlier distribution (Yin et al., OWL, arXiv 2310.05175): percentage of outliers in `|w| * ||x||`.

    Args:
        weights: `[out_i, in_i]` of the layers that share one sparsity (in the paper: those of a block).
        statistics: of the input of each.
    """
    outliers = total = 0
    for weight, seen in zip(weights, statistics, strict=True):
        importance = weight.detach().to(torch.float32).abs() * seen.square_mean.sqrt()
        outliers += int((importance > OUTLIER * importance.mean()).sum())
        total += importance.numel()
    return 100.0 * outliers / max(total, 1)


def error_score(weight: torch.Tensor, statistics: Statistics, sparsity: float) -> float:
    """Share of the layer's output energy that goes with the least important weights (by `|w| * ||x||`) at this sparsity."""
    energy = weight.detach().to(torch.float32).square() * statistics.square_mean
    count = round(sparsity * energy.numel())
    if count == 0:
        return 0.0
    threshold = energy.flatten().kthvalue(count).values
    return float(energy[energy <= threshold].sum() / energy.sum().clamp(min=1e-30))
