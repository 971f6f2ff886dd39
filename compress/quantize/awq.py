"""AWQ: channels that matter are scaled up before rounding (Lin et al. 2023, 2306.00978)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.core.method import Method
from compress.core.statistics import Statistics
from compress.quantize.config import QuantizeConfig
from compress.quantize.transform import awq_scales
from runtime.formats.scheme import Scheme


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


def scales(weights: list[torch.Tensor], statistics: Statistics, scheme: Scheme, config: AWQConfig) -> torch.Tensor:
    """Channel scales `[in]` for weights that share an input."""
    return awq_scales(weights, statistics, scheme, config.grid_points, config.duo_scaling)


METHOD = Method(
    name="awq",
    config=AWQConfig,
    summary="scales important channels up before rounding, and clips",
    paper="Lin et al., AWQ, 2023, arXiv 2306.00978",
    needs=frozenset({"hessian", "ranges"}),
    transforms=True,
    scales=scales,
)
