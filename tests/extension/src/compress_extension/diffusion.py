"""Error-diffusion rounding (Floyd and Steinberg, 1976): what rounding a column loses is added to the next, so that errors cancel."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.core.method import Method, Problem
from compress.quantize import QuantizeConfig
from runtime.errors import RequestError
from runtime.formats.scheme import CompressedWeight


class DiffusionConfig(QuantizeConfig):
    """Round each row from left to right and carry the rounding error along; needs no calibration, and takes any representation."""

    method: Literal["diffusion"] = Field("diffusion", description="Name of the method.")
    carry: float = Field(1.0, ge=0, le=1, description="Fraction of the error that is carried to the next columns.")


def solve(problem: Problem) -> list[CompressedWeight]:
    """A compressed weight for each of the problem's."""
    represented = problem.scheme.weights
    assert represented is not None
    if problem.masks is not None:
        raise RequestError(f"{problem.names[0]}: method diffusion rounds dense weights only")
    found = []
    for weight in problem.weights:
        columns = weight.float().T.contiguous()
        parameters = represented.fit(columns.T, problem.dtype)
        carried, codes = torch.zeros_like(columns[0]), []
        for first in range(0, len(columns), represented.vector):
            wanted = columns[first : first + represented.vector] + problem.quantize.carry * carried
            values, code = represented.nearest(wanted, parameters, first)
            carried = (wanted - values).mean(0)
            codes.append(code)
        found.append(CompressedWeight.of(torch.stack(codes, 1), parameters, None, problem.scheme, problem.dtype))
    return found


METHOD = Method(
    name="diffusion",
    config=DiffusionConfig,
    summary="rounds from left to right and carries the error along",
    paper="Floyd and Steinberg, An Adaptive Algorithm for Spatial Grayscale, 1976",
    solve=solve,
)
