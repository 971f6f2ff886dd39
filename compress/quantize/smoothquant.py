"""SmoothQuant: outliers of the inputs move into the weights, so that both round well (Xiao et al. 2022, 2211.10438)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from compress.core.method import DEFAULTS, ColumnLoop, Method
from compress.core.statistics import Statistics
from compress.quantize.config import QuantizeConfig
from runtime.formats.scheme import Scheme


class SmoothQuantConfig(QuantizeConfig):
    """Balance the ranges of inputs and weights channel by channel; meant for schemes that quantize the inputs too (W8A8-INT8)."""

    method: Literal["smoothquant"] = Field("smoothquant", description="Name of the method.")
    alpha: float = Field(
        0.5, ge=0, le=1, description="How much of the difficulty moves into the weights: 0 none, 1 all."
    )
    solver: Literal["rtn", "gptq"] = Field("rtn", description="How the scaled weights are rounded.")

    def column_loop(self, base: ColumnLoop = DEFAULTS) -> ColumnLoop | None:
        return replace(base, scales=self.scales) if self.solver == "gptq" else None


def scales(
    weights: list[torch.Tensor], statistics: Statistics, scheme: Scheme, config: SmoothQuantConfig
) -> torch.Tensor:
    """`s = max|x|^alpha / max|w|^(1 - alpha)` moves outliers of the input into the weights; the input is divided by `s`.

    `weights [out_i, in]` share the input; returns `s [in]` float32, positive.
    """
    inputs = torch.maximum(statistics.maximum.abs(), statistics.minimum.abs()).clamp(min=1e-5)
    largest = torch.stack([w.detach().to(torch.float32).abs().amax(0) for w in weights]).amax(0).clamp(min=1e-5)
    s = inputs.pow(config.alpha) / largest.pow(1 - config.alpha)
    # A channel that is never used must not blow up its producer.
    return s.clamp(min=1e-5)


METHOD = Method(
    name="smoothquant",
    config=SmoothQuantConfig,
    summary="moves outliers of the inputs into the weights",
    paper="Xiao et al., SmoothQuant, 2022, arXiv 2211.10438",
    needs=frozenset({"hessian", "ranges"}),
    scales=scales,
)
