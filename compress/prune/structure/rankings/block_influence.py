"""Block influence: layers that hardly turn the hidden states are removed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class BlockInfluenceConfig(StructureConfig):
    """Remove the layers whose output is most like their input: one minus the cosine between the two, mean over tokens."""

    method: Literal["block_influence"] = Field("block_influence", description="Name of the method.")
    remove: Literal["layers"] = Field("layers", description="What: layers.")


METHOD = StructureMethod(
    BlockInfluenceConfig,
    lambda view, _: view.influence,
    summary="removes the layers that change the hidden states least",
    paper="Men et al., ShortGPT: Layers in Large Language Models are More Redundant Than You Expect, 2024, arXiv 2403.03853",
    removes={"layers"},
    needs={"influence"},
)
