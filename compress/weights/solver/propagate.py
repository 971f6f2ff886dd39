"""Weights that make up for the errors of the layers before them: least squares towards what the layer gives in the original model.

With `x` the input of a layer and `o` what it reads in the original model, `W' = W + W E[(o - x) x^T] (H + d I)^-1` minimizes
`E |W' x - W o|^2 + d |W' - W|^2`. Every solver that then keeps the output of `W'` keeps that of the original model: the asymmetric
calibration of GPTAQ (Li et al., 2025, arXiv 2504.02692) in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compress.core import file_matrix
from compress.core.statistics import Statistics
from compress.weights.solver.columns import rows_at_a_time
from compress.weights.solver.factor import Factor, factorize

#: `d` as a fraction of the mean of the Hessian's diagonal.
DAMPING = 0.05
#: Random directions that tell how much of the drift is explained.
DIRECTIONS = 64


def propagated(weights: Sequence[torch.Tensor], statistics: Statistics, name: str) -> list[torch.Tensor]:
    """The weights `[out_i, in]` of layers with one input, float32, moved towards what they give in the original model.

    Args:
        weights: any float dtype; not changed.
        statistics: of the input, with Hessian and drift.
        name: of the first layer, for messages.
    """
    hessian, drift = statistics.hessian, statistics.drift
    assert hessian is not None
    assert drift is not None
    factor = factorize(hessian, torch.arange(hessian.shape[0], device=hessian.device), DAMPING, name)
    share = _share(factor, drift, statistics)
    found = []
    for weight in weights:
        moved = weight.to(torch.float32, copy=True)
        for rows in file_matrix.panels(weight.shape[0], rows_at_a_time(weight.shape[1])):
            moved[rows] += share * factor.solve(file_matrix.product(drift, moved[rows].T)).T
        found.append(moved)
    return found


def _share(factor: Factor, drift: torch.Tensor, statistics: Statistics) -> float:
    """Of the drift that inputs explain on the calibration text, the share that they explain on other text too.

    Least squares with p inputs explain p / n of any noise in n tokens and leave the rest, so what is explained, `F = tr(D^T H^-1 D)`, has
    `p / (n - p)` times the rest in it. F is estimated from random directions (Hutchinson, 1990).
    """
    columns, tokens = drift.shape[0], statistics.tokens
    if tokens <= columns:
        return 0.0
    generator = torch.Generator(drift.device).manual_seed(0)
    directions = torch.randn(columns, DIRECTIONS, generator=generator, device=drift.device)
    along = file_matrix.product(drift, directions)
    explained = float((along * factor.solve(along)).sum()) / DIRECTIONS
    if explained <= 0:
        return 0.0
    rest = max(0.0, statistics.drifted - explained)
    return max(0.0, 1 - columns / (tokens - columns) * rest / explained)
