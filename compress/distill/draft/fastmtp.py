"""FastMTP: one head on the artifact, applied again and again."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from compress.distill.draft.config import DraftMethod
from compress.distill.draft.features import Features
from compress.distill.draft.making import Making
from compress.distill.draft.making_heads import HeadsConfig, check_heads, make_heads
from compress.distill.draft.mtp import MTPStudent


class MTPConfig(HeadsConfig):
    """A block as of the artifact's own, on its hidden states and the tokens after them; it foretells the next token but one, and out of its
    own output the ones after that. One set of weights serves all places. `vocabulary` decides much of what a token costs.
    """

    method: Literal["mtp"] = Field("mtp", description="Name of the method.")
    data: Literal["given", "teacher"] = Field(
        "teacher", description="What is trained on: the calibration text, or what the artifact writes after it."
    )
    tokens: int = Field(3, ge=1, le=16, description="Tokens ahead that are trained.")
    decay: float = Field(
        0.6, gt=0, le=1, description="Weight of the loss of each further token, of that of the one before."
    )
    intermediate: int | None = Field(None, ge=1, description="Width of the block's MLP; none: the artifact's.")
    quantize: Literal["none"] = Field("none", description="Heads are rounded where they run.")


def make(making: Making, config: MTPConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    kept = making.kept(config.vocabulary, making.split()[0])
    student = MTPStudent(
        Features.of(making.teacher.source),
        config.tokens,
        config.intermediate,
        config.objective(),
        kept,
        config.decay,
        seed=config.seed,
    )
    return make_heads(making, config, student)


METHOD = DraftMethod(
    name="mtp",
    config=MTPConfig,
    summary="one small block on the artifact that foretells token after token",
    paper="Cai et al., FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction, 2025, arXiv 2509.18362",
    make=make,
    check=check_heads,
)
