"""Function-preserving scales: columns of a weight times `s`, its input divided by `s` (folded into whatever produces it).

All losses are computed from second moments: `tr(E H E^T)` is the output error over all calibration tokens, so no forward pass is
needed to try a scale.
"""

from __future__ import annotations

from typing import Literal

import torch

from compress.core.statistics import Statistics
from compress.quantize.grid import make_grid
from compress.quantize.objective import row_errors
from runtime.errors import CompressError
from runtime.formats.scheme import Scheme

#: Rows (spread evenly over the consumers) on which AWQ candidates are compared; the scale belongs to columns, so a sample is enough.
SAMPLE_ROWS = 1024


def awq_scales(
    weights: list[torch.Tensor],
    statistics: Statistics,
    scheme: Scheme,
    grid_points: int = 20,
    duo: bool = True,
    search: Literal["mse", "minmax"] = "mse",
) -> torch.Tensor:
    """Scales that minimise the rounding error of the outputs (Lin et al., AWQ, arXiv 2306.00978).

    Args:
        weights: float `[out_i, in]`, all consumers of one input.
        statistics: of that input, with its Hessian.
        scheme: grid the weights will be rounded to.
        grid_points: exponents `ratio` tried in [0, 1).
        duo: also try `s = x^ratio / w^(1 - ratio)`, which counts the size of the weights, beside `s = x^ratio`.

    Returns:
        `s [in]` float32, positive.
    """
    assert scheme.weights is not None
    if statistics.hessian is None:
        raise CompressError("awq needs second moments of the inputs, and they were not collected")
    stacked = torch.cat([w.detach().to(torch.float32) for w in weights])
    step = -(-stacked.shape[0] // SAMPLE_ROWS)
    size = _weight_size(stacked, scheme)
    sample = stacked[::step].contiguous()
    del stacked
    x = statistics.abs_mean.clamp(min=1e-8)
    best, chosen = float("inf"), torch.ones_like(x)
    for with_weights in (False, True) if duo else (False,):
        for i in range(grid_points):
            ratio = i / grid_points
            s = x.pow(ratio) / size.pow(1 - ratio) if with_weights else x.pow(ratio)
            s = _normalized(s)
            scaled = sample * s
            grid = make_grid(scaled, scheme.weights, torch.float32, search, statistics.square_mean / s.square())
            difference = sample - grid.values(grid.codes(scaled)) / s
            loss = float(row_errors(difference, statistics.hessian).sum())
            if loss < best:
                best, chosen = loss, s
    return chosen


def smoothquant_scales(weights: list[torch.Tensor], statistics: Statistics, alpha: float = 0.5) -> torch.Tensor:
    """`s = max|x|^alpha / max|w|^(1 - alpha)` moves outliers of the input into the weights; the input is divided by `s`.

    Xiao et al., SmoothQuant, arXiv 2211.10438. `weights [out_i, in]` share the input; returns `s [in]` float32, positive.
    """
    inputs = torch.maximum(statistics.maximum.abs(), statistics.minimum.abs()).clamp(min=1e-5)
    largest = torch.stack([w.detach().to(torch.float32).abs().amax(0) for w in weights]).amax(0).clamp(min=1e-5)
    s = inputs.pow(alpha) / largest.pow(1 - alpha)
    # A channel that is never used must not blow up its producer.
    return s.clamp(min=1e-5)


def _weight_size(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Mean over rows of `|w|` relative to the largest of its group, `[in]`."""
    assert scheme.weights is not None
    columns = weight.shape[1]
    group = scheme.weights.group_size if scheme.weights.strategy == "group" else columns
    assert group is not None
    total = torch.empty(columns, device=weight.device)
    for start in range(0, columns, group):
        part = weight[:, start : start + group].abs()
        total[start : start + group] = (part / part.amax(1, keepdim=True).clamp(min=1e-8)).mean(0)
    return total.clamp(min=1e-4)


def _normalized(s: torch.Tensor) -> torch.Tensor:
    """Scales around 1 (the geometric middle of the extremes), as in the paper's code; never so extreme that a dtype overflows."""
    s = s.clamp(min=1e-4)
    return (s / (s.max() * s.min()).sqrt()).clamp(min=1e-4, max=1e4)
