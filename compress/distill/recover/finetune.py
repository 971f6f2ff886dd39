"""Sparse fine-tuning: all weights that are left are trained, removed ones stay zero, the dense model is the teacher."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.core.method import Method
from compress.distill.recover.config import RecoverConfig


class FinetuneConfig(RecoverConfig):
    """Train all weights. What earlier stages have removed stays zero; what they have quantized is trained through its grid (by the
    straight-through estimator), and ends on it.
    """

    method: Literal["finetune"] = Field("finetune", description="Name of the method.")


METHOD = Method(
    name="finetune",
    config=FinetuneConfig,
    summary="trains all weights that are left, towards the model's own outputs and hidden states",
    paper="Kurtic et al., Sparse Finetuning for Inference Acceleration of Large Language Models, 2023, arXiv 2310.06927",
)
