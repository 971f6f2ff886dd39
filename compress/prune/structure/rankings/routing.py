"""Routing: experts that the router hardly turns to are removed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class RoutingConfig(StructureConfig):
    """Remove the experts with the least routing weight: its mean over calibration tokens, nothing for those that an expert is not sent.

    It is the mean weight of an expert where it is used times the share of tokens that use it.
    """

    method: Literal["routing"] = Field("routing", description="Name of the method.")
    remove: Literal["experts"] = Field("experts", description="What: experts.")


METHOD = StructureMethod(
    RoutingConfig,
    lambda view, _: view.routing.weight / max(view.routing.tokens, 1),
    summary="removes the experts that tokens are sent to least, by weight and number",
    paper="soft counting: Muzio et al., SEER-MoE: Sparse Expert Efficiency through Regularization for Mixture-of-Experts, 2024, "
    "arXiv 2404.05089; of removing experts: Lu et al., Not All Experts are Equal, 2024, arXiv 2402.14800",
    removes={"experts"},
    needs={"routing"},
)
