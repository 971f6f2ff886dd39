"""Medusa: heads on the artifact, each of which foretells one of the next tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from compress.distill.draft.config import DraftMethod
from compress.distill.draft.features import Features
from compress.distill.draft.heads import MedusaStudent
from compress.distill.draft.making import Making
from compress.distill.draft.making_heads import HeadsConfig, check_heads, make_heads


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


def make(making: Making, config: MedusaConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    kept = making.kept(config.vocabulary, making.split()[0])
    student = MedusaStudent(
        Features.of(making.teacher.source), config.tokens, config.blocks, config.objective(), kept, config.decay
    )
    return make_heads(making, config, student)


METHOD = DraftMethod(
    name="medusa",
    config=MedusaConfig,
    summary="heads on the artifact that foretell several tokens at once",
    paper="Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, 2024, arXiv 2401.10774",
    make=make,
    check=check_heads,
)
