"""Random ranking: the floor that any other is measured against."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.method import StructureMethod


class RandomConfig(StructureConfig):
    """Remove units at random: the floor that rankings are measured against."""

    method: Literal["random"] = Field("random", description="Name of the method.")


METHOD = StructureMethod(
    RandomConfig,
    lambda view, _: torch.rand(view.count, generator=view.generator),
    summary="removes units at random, to compare with",
    paper="none: a baseline",
    removes={"ffn", "heads", "layers", "experts", "hidden"},
)
