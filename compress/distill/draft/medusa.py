"""Medusa: heads on the artifact, each of which foretells one of the next tokens (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import Field

from compress.distill.draft.features import Features
from compress.distill.draft.heads import HeadsConfig, HeadStudent, check_heads, train_heads
from compress.distill.draft.training import DraftMethod, DraftTraining
from runtime.drafting.drafters.medusa import MedusaHeads
from runtime.errors import RequestError


class MedusaConfig(HeadsConfig):
    """Small heads on the artifact's last hidden state, which is frozen: the k-th foretells the token k places after the next one. They cost
    one pass for all, and a tree of what they say is verified in one step. Each has residual blocks and a projection of its own, and all
    share the artifact's own head.
    """

    method: Literal["medusa"] = Field("medusa", description="Name of the method.")
    data: Literal["given", "teacher"] = Field(
        "teacher", description="What is trained on: the calibration text, or what the artifact writes after it."
    )
    tokens: int = Field(4, ge=1, le=16, description="Heads.")
    blocks: int = Field(1, ge=1, le=8, description="Residual blocks of each head.")
    quantize: Literal["none"] = Field("none", description="Heads are rounded where they run.")


class MedusaStudent(HeadStudent):
    """Medusa heads, which at first all say what the target says next. The paper weights head k by 0.8^k."""

    one_pass = True

    def __init__(self, features: Features, config: MedusaConfig, kept: torch.Tensor | None = None) -> None:
        heads = MedusaHeads(features.parts.hidden, config.tokens, config.blocks)
        heads.begin()
        super().__init__(features, heads, config, kept)
        self.blocks = config.blocks

    @property
    def sizes(self) -> dict[str, int]:
        return {"count": self.levels, "blocks": self.blocks}

    def states(self, ids: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        if length > self.levels:
            raise RequestError(f"there are {self.levels} heads; they cannot propose {length} tokens")
        hidden = self.features.hidden(ids)
        module: Any = self.draft.module
        for ahead, head in enumerate(module.heads[:length]):
            yield head(hidden[:, : hidden.shape[1] - 1 - ahead])


def make(training: DraftTraining, config: MedusaConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    return train_heads(training, config, MedusaStudent)


METHOD = DraftMethod(
    name="medusa",
    config=MedusaConfig,
    summary="heads on the artifact that foretell several tokens at once",
    paper="Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, 2024, arXiv 2401.10774",
    make=make,
    check=check_heads,
)
