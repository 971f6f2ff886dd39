"""SmoothQuant: outliers of the inputs move into the weights, so that both round well (Xiao et al. 2022, 2211.10438)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.core.method import Method
from compress.core.statistics import Statistics
from compress.quantize.config import QuantizeConfig
from compress.quantize.transform import smoothquant_scales
from runtime.formats.scheme import Scheme


class SmoothQuantConfig(QuantizeConfig):
    """Balance the ranges of inputs and weights channel by channel; meant for schemes that quantize the inputs too (W8A8-INT8)."""

    method: Literal["smoothquant"] = Field("smoothquant", description="Name of the method.")
    alpha: float = Field(
        0.5, ge=0, le=1, description="How much of the difficulty moves into the weights: 0 none, 1 all."
    )
    solver: Literal["rtn", "gptq"] = Field("rtn", description="How the scaled weights are rounded.")


def scales(
    weights: list[torch.Tensor], statistics: Statistics, scheme: Scheme, config: SmoothQuantConfig
) -> torch.Tensor:
    """Channel scales `[in]` for weights that share an input."""
    return smoothquant_scales(weights, statistics, config.alpha)


METHOD = Method(
    name="smoothquant",
    config=SmoothQuantConfig,
    summary="moves outliers of the inputs into the weights",
    paper="Xiao et al., SmoothQuant, 2022, arXiv 2211.10438",
    needs=frozenset({"hessian", "ranges"}),
    transforms=True,
    scales=scales,
)
