"""Round-to-nearest quantization, the baseline."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.core.method import Method
from compress.quantize.config import QuantizeConfig


class RTNConfig(QuantizeConfig):
    """Round every weight to the nearest grid value; needs no calibration (with it, scales are weighted by the inputs)."""

    method: Literal["rtn"] = Field("rtn", description="Name of the method.")


METHOD = Method(
    name="rtn",
    config=RTNConfig,
    summary="rounds every weight to the nearest grid value",
    paper="the baseline of the field; MSE-searched scales as in Choukroun et al. 2019, arXiv 1902.06822",
)
