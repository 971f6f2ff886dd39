"""Medusa: heads on the artifact, each of which predicts one of the next tokens (Cai et al., arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field

from compress.distill.draft.features import Features
from compress.distill.draft.heads import HeadsConfig, HeadStudent, check_heads, train_heads
from compress.distill.draft.training import DraftMethod
from runtime.drafting.drafters.medusa import MedusaHeads


class MedusaConfig(HeadsConfig):
    """Small heads on the artifact's last hidden state, which is frozen: the k-th predicts the token k places after the next one. They cost
    one pass for all, and a tree of what they say is verified in one step. Each has residual blocks and a projection of its own, and all
    share the artifact's own head.
    """

    method: Literal["medusa"] = Field("medusa", description="Name of the method.")
    tokens: int = Field(4, ge=1, le=16, description="Heads.")
    blocks: int = Field(1, ge=1, le=8, description="Residual blocks of each head.")


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
        hidden = self.features.hidden(ids)
        module: Any = self.draft.module
        for ahead, head in enumerate(module.heads[:length]):
            yield head(hidden[:, : hidden.shape[1] - 1 - ahead])


METHOD = DraftMethod(
    name="medusa",
    config=MedusaConfig,
    summary="heads on the artifact that predict several tokens at once",
    paper="Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, 2024, arXiv 2401.10774",
    make=partial(train_heads, student=MedusaStudent),
    check=check_heads,
)
