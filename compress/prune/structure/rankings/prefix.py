"""Prefix ranking: the first units stay, for models whose first channels were trained to be a model by themselves."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class PrefixConfig(StructureConfig):
    """Keep the first units, as a nested checkpoint (MatFormer) is made for; nothing is fitted unless `reconstruct` asks for it."""

    method: Literal["prefix"] = Field("prefix", description="Name of the method.")
    reconstruct: bool = Field(False, description="Fit the layer that reads the channels, by least squares.")


METHOD = StructureMethod(
    PrefixConfig,
    lambda view, _: -torch.arange(view.count, dtype=torch.float32),
    summary="keeps the first units, of checkpoints that are trained for it",
    paper="Devvrit et al., MatFormer: Nested Transformer for Elastic Inference, 2023, arXiv 2310.07707",
    removes={"ffn", "heads"},
)
