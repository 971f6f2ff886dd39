"""Magnitude pruning: the smallest weights go (Han et al. 2015, 1506.02626)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.core.method import Method
from compress.prune.config import PruneConfig


class MagnitudeConfig(PruneConfig):
    """Remove the weights with the smallest absolute value; needs no calibration."""

    method: Literal["magnitude"] = Field("magnitude", description="Name of the method.")


METHOD = Method(
    name="magnitude",
    config=MagnitudeConfig,
    summary="removes the smallest weights, without calibration",
    paper="Han et al., Learning both Weights and Connections, 2015, arXiv 1506.02626",
    score=lambda weight, statistics: weight.abs(),
)
