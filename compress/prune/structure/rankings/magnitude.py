"""Magnitude: units are ranked by the norm of all their weights."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class MagnitudeConfig(StructureConfig):
    """Remove the units whose weights, of all tensors that have slices of them, are smallest by the Euclidean norm."""

    method: Literal["magnitude"] = Field("magnitude", description="Name of the method.")


METHOD = StructureMethod(
    MagnitudeConfig,
    lambda view, _: torch.stack([weights.square().sum(1) for weights in view.weights]).sum(0).sqrt(),
    summary="removes the units with the smallest weights",
    paper="Li et al., Pruning Filters for Efficient ConvNets, 2017, arXiv 1608.08710",
    removes={"ffn", "heads", "layers", "experts", "hidden"},
)
