"""Low-rank adapters: few numbers are trained, and merged into the weights when that is done."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.core.method import Method
from compress.distill.recover.config import RecoverConfig
from compress.distill.recover.constraints import Adapter


class LoraConfig(RecoverConfig):
    """Train low-rank changes of the linear layers, which are merged in the end; removed weights stay zero, quantized ones on their grid."""

    method: Literal["lora"] = Field("lora", description="Name of the method.")
    rank: int = Field(16, ge=1, le=65_536, description="Of each change.")
    alpha: float = Field(32.0, gt=0, description="A change counts alpha / rank times.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="At its height, after the warmup.")

    @property
    def adapter(self) -> Adapter:
        """See `RecoverConfig.adapter`."""
        return Adapter(self.rank, self.alpha / self.rank)


METHOD = Method(
    name="lora",
    config=LoraConfig,
    summary="trains low-rank changes of the linear layers and merges them",
    paper="Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, arXiv 2106.09685",
)
