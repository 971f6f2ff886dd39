"""Wanda, for whole channels: weights times the norm of what they multiply, summed over a unit."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod, View


class WandaConfig(StructureConfig):
    """Remove the units that add least to what their reader gives: |w| * ||x|| of all weights that read them."""

    method: Literal["wanda"] = Field("wanda", description="Name of the method.")


def rank(view: View, config: WandaConfig) -> torch.Tensor:
    """`[units]`, the sum of `|w| * sqrt(mean x^2)`."""
    score = view.columns.abs().sum(0) * view.statistics.square_mean.sqrt().to(view.columns)
    return score.view(view.count, view.each).sum(1)


METHOD = StructureMethod(
    WandaConfig,
    rank,
    summary="removes the units with the smallest weights times inputs",
    paper="after Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2023, arXiv 2306.11695",
    removes={"ffn", "heads"},
    needs={"ranges"},
)
