"""REAP: experts that add little where they are used are removed, by routing weight times the norm of what they give."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class ReapConfig(StructureConfig):
    """Remove the experts that add least to the tokens that they are sent: the mean over these of routing weight times output norm."""

    method: Literal["reap"] = Field("reap", description="Name of the method.")
    remove: Literal["experts"] = Field("experts", description="What: experts.")


METHOD = StructureMethod(
    ReapConfig,
    lambda view, _: view.routing.output / view.routing.used.clamp_min(1),
    summary="removes the experts that add least to the tokens that they are sent",
    paper="Lasby et al., REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression, 2025, arXiv 2510.13999",
    removes={"experts"},
    needs={"routing", "expert_outputs"},
)
