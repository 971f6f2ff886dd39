"""Activation: dimensions of the hidden state are ranked by how large they are where layers read them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class ActivationConfig(StructureConfig):
    """Remove the dimensions of the hidden state that are smallest after the norms, mean over tokens and layers."""

    method: Literal["activation"] = Field("activation", description="Name of the method.")
    remove: Literal["hidden"] = Field("hidden", description="What: dimensions of the hidden state.")


METHOD = StructureMethod(
    ActivationConfig,
    lambda view, _: view.states,
    summary="removes the dimensions of the hidden state that are smallest",
    paper="Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (Minitron), 2024, arXiv 2407.14679",
    removes={"hidden"},
    needs={"states"},
)
