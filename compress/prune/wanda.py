"""Wanda: weights are ranked by their size times the norm of what they multiply (Sun et al. 2023, 2306.11695)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.core.method import Method
from compress.core.statistics import Statistics
from compress.prune.config import PruneConfig


class WandaConfig(PruneConfig):
    """Remove, row by row, the weights with the smallest |w| * ||x||; the remaining weights stay as they are."""

    method: Literal["wanda"] = Field("wanda", description="Name of the method.")


def score(weight: torch.Tensor, statistics: Statistics | None) -> torch.Tensor:
    """`|w| * sqrt(mean x^2)`, `[out, in]`."""
    assert statistics is not None
    return weight.abs() * statistics.square_mean.sqrt().to(weight)


METHOD = Method(
    name="wanda",
    config=WandaConfig,
    summary="removes weights by size times input norm, row by row",
    paper="Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2023, arXiv 2306.11695",
    needs=frozenset({"ranges"}),
    score=score,
    per_row=True,
)
