"""Fields that every draft method has."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.distill.train.losses import Objective


class DraftConfig(BaseModel):
    """Make a small model that proposes what the artifact will write; it goes into the artifact, and `runtime.load` decodes with it."""

    model_config = ConfigDict(extra="forbid")

    method: str = Field(description="Name of the method, see `compress methods`.")
    data: Literal["given", "teacher", "on_policy", "mixed"] = Field(
        "mixed",
        description="What is trained on: the calibration text, what the artifact writes after it, what the draft itself writes, or half "
        "of the last two.",
    )
    continuations: int = Field(
        1, ge=1, le=10_000, description="Texts that are written after each row's beginning (data other than given)."
    )
    divergence: Literal["forward_kl", "reverse_kl", "js", "tvd", "cross_entropy"] = Field(
        "forward_kl", description="What is made small between the artifact's distribution and the draft's."
    )
    temperature: float = Field(1.0, gt=0, le=100, description="Of both distributions in the loss.")
    samples: int = Field(
        512, ge=8, le=1_000_000, description="Rows of calibration text; an eighth of them, 64 at most, is held out."
    )
    sequence_length: int = Field(256, ge=16, le=1_048_576, description="Tokens of a row.")
    steps: int = Field(400, ge=1, le=10_000_000, description="Updates at most.")
    batch_size: int = Field(8, ge=1, le=65_536, description="Rows of an update, over all processes together.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="At its height, after the warmup.")
    evaluate_every: int = Field(50, ge=1, description="Updates between looks at held-out acceptance.")
    patience: int | None = Field(
        5, ge=1, description="Looks in a row without a gain that end the training; none: it goes on to the last step."
    )
    teacher_top: int | None = Field(
        None,
        ge=1,
        description="Keep so many of the teacher's likeliest tokens a position on disk, computed once; none: compute them in each step.",
    )
    quantize: Literal["none", "W8A16", "W4A16"] = Field("W8A16", description="How the draft's own weights are stored.")
    tokens: int = Field(5, ge=1, le=64, description="Tokens of a draft when acceptance is measured.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of rows, of what is written, and of the order of training.")

    def objective(self) -> Objective:
        """The loss of this config."""
        return Objective(self.divergence, self.temperature)


class CutConfig(DraftConfig):
    """A draft that is cut out of the artifact, or begins as a smaller checkpoint."""

    layers: int | list[int] | None = Field(
        2,
        description="Layers of the artifact that the draft begins with: so many, evenly spread with the first and the last among them, "
        "or their indices.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="A checkpoint with the artifact's vocabulary that the draft begins as, in the place of layers: a directory (relative "
        "to the recipe) or a hub id.",
    )
    vocabulary: int | None = Field(
        None,
        ge=1,
        description="Tokens that the draft may propose, those that the artifact writes most (VocabTrim, 2506.22694); none: all.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_model(cls, fields: Any) -> Any:
        """The number of layers has a default only where there is something to cut."""
        if isinstance(fields, dict) and fields.get("model") is not None:
            return {"layers": None, **fields}
        return fields
