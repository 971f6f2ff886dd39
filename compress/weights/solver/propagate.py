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
from compress.weights.solver.factor import factorize

#: `d` as a fraction of the mean of the Hessian's diagonal.
DAMPING = 0.01


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
    found = []
    for weight in weights:
        moved = weight.to(torch.float32, copy=True)
        for rows in file_matrix.panels(weight.shape[0], rows_at_a_time(weight.shape[1])):
            moved[rows] += factor.solve(file_matrix.product(drift, moved[rows].T)).T
        found.append(moved)
    return found
