"""AWQ: channels that matter are scaled up before rounding (Lin et al. 2023, 2306.00978).

The scales preserve the function: columns of a weight times `s`, its input divided by `s` (folded into whatever produces it). A loss is
computed from second moments: `tr(E H E^T)` is the output error over all calibration tokens, so no forward pass is needed to try a scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from compress.core.method import DEFAULTS, ColumnLoop, Method
from compress.core.statistics import Statistics
from compress.quantize.config import QuantizeConfig
from compress.quantize.grid import nearest_values
from compress.quantize.objective import row_errors
from runtime.formats.scheme import GridScheme, Scheme

#: Rows (spread evenly over the consumers) on which AWQ candidates are compared; the scale belongs to columns, so a sample is enough.
SAMPLE_ROWS = 1024


class AWQConfig(QuantizeConfig):
    """Search, for every shared input, channel scales that make rounding lose least at the output, and fold them into the neighbours.

    Clipping is searched along with the scales of the grid (`scales: hessian`): of every group, the range whose rounding error
    counts least at the output.
    """

    method: Literal["awq"] = Field("awq", description="Name of the method.")
    scales: Literal["hessian", "mse", "minmax", "positive"] = Field(
        "hessian",
        description="Clipping by least output error of the group, by least weighted squared error, none, or mse without negative scales.",
    )
    grid_points: int = Field(20, ge=1, le=200, description="Exponents tried for the channel scales.")
    duo_scaling: bool = Field(True, description="Also try scales that count the size of the weights.")
    solver: Literal["rtn", "gptq"] = Field("rtn", description="How the scaled weights are rounded.")

    def column_loop(self, base: ColumnLoop = DEFAULTS) -> ColumnLoop | None:
        return replace(base, scales=self.scales) if self.solver == "gptq" else None


def scales(weights: list[torch.Tensor], statistics: Statistics, scheme: Scheme, config: AWQConfig) -> torch.Tensor:
    """Channel scales that minimise the rounding error of the outputs (Lin et al., AWQ, arXiv 2306.00978).

    Besides `s = x^ratio` for `grid_points` exponents in [0, 1), `duo_scaling` tries `s = x^ratio / w^(1 - ratio)`, which counts the size of
    the weights.

    Args:
        weights: float `[out_i, in]`, all consumers of one input.
        statistics: of that input, with its Hessian.
        scheme: grid the weights will be rounded to.

    Returns:
        `s [in]` float32, positive.
    """
    assert scheme.weights is not None
    assert statistics.hessian is not None
    stacked = torch.cat([w.detach().to(torch.float32) for w in weights])
    step = -(-stacked.shape[0] // SAMPLE_ROWS)
    size = _weight_size(stacked, scheme)
    sample = stacked[::step].contiguous()
    del stacked
    x = statistics.abs_mean.clamp(min=1e-8)
    best, chosen = float("inf"), torch.ones_like(x)
    for with_weights in (False, True) if config.duo_scaling else (False,):
        for i in range(config.grid_points):
            ratio = i / config.grid_points
            s = x.pow(ratio) / size.pow(1 - ratio) if with_weights else x.pow(ratio)
            s = _normalized(s)
            scaled = sample * s
            importance = statistics.square_mean / s.square()
            difference = sample - nearest_values(scaled, scheme.weights, torch.float32, importance) / s
            loss = float(row_errors(difference, statistics.hessian).sum())
            if loss < best:
                best, chosen = loss, s
    return chosen


def _weight_size(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Mean over rows of `|w|` relative to the largest of its group, `[in]`."""
    columns = weight.shape[1]
    group = scheme.weights.width(columns) if isinstance(scheme.weights, GridScheme) else columns
    total = torch.empty(columns, device=weight.device)
    for start in range(0, columns, group):
        part = weight[:, start : start + group].abs()
        total[start : start + group] = (part / part.amax(1, keepdim=True).clamp(min=1e-8)).mean(0)
    return total.clamp(min=1e-4)


def _normalized(s: torch.Tensor) -> torch.Tensor:
    """Scales around 1 (the geometric middle of the extremes), as in the paper's code; never so extreme that a dtype overflows."""
    s = s.clamp(min=1e-4)
    return (s / (s.max() * s.min()).sqrt()).clamp(min=1e-4, max=1e4)


METHOD = Method(
    name="awq",
    config=AWQConfig,
    summary="scales important channels up before rounding, and clips",
    paper="Lin et al., AWQ, 2023, arXiv 2306.00978",
    needs=frozenset({"hessian", "ranges"}),
    scales=scales,
)
