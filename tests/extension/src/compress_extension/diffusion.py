"""Error-diffusion rounding (Floyd and Steinberg, 1976): what rounding a column loses is added to the next, so that the errors of a row cancel."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.core.method import Method, Problem
from compress.quantize import QuantizeConfig
from compress.quantize.grid import make_grid
from runtime.formats.scheme import CompressedWeight


class DiffusionConfig(QuantizeConfig):
    """Round each row from left to right and carry the rounding error along; needs no calibration."""

    method: Literal["diffusion"] = Field("diffusion", description="Name of the method.")
    carry: float = Field(1.0, ge=0, le=1, description="Fraction of the error that is carried to the next column.")


def solve(problem: Problem) -> list[CompressedWeight]:
    """Codes of every weight of the problem, on a grid."""
    found = []
    for weight in problem.weights:
        weight = weight.float()
        grid = make_grid(weight, problem.scheme.grid, problem.dtype, problem.quantize.scales)
        values, carried = torch.empty_like(weight), torch.zeros(weight.shape[0])
        for j in range(weight.shape[1]):
            wanted = weight.clone()
            wanted[:, j] += problem.quantize.carry * carried
            values[:, j] = grid.values(grid.codes(wanted))[:, j]
            carried = wanted[:, j] - values[:, j]
        found.append(grid.weight(grid.codes(values), None, problem.scheme, problem.dtype))
    return found


METHOD = Method(
    name="diffusion",
    config=DiffusionConfig,
    summary="rounds from left to right and carries the error along",
    paper="Floyd and Steinberg, An Adaptive Algorithm for Spatial Grayscale, 1976",
    solve=solve,
)
