"""Fields of the stage `recover`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.distill.recover.constraints import Adapter
from compress.distill.train.losses import Divergence


class RecoverConfig(BaseModel):
    """Train what earlier stages have made of the model, so that it gives again what the model gave before."""

    model_config = ConfigDict(extra="forbid")
    nested: ClassVar[bool] = False  # prefixes of the model are trained with it

    method: str = Field(description="Name of the method, see `compress methods`.")
    cross_entropy: float = Field(0.0, ge=0, description="Weight of the loss on the tokens of the text.")
    kl: float = Field(
        1.0, ge=0, description="Weight of the divergence between the next-token distributions of teacher and student."
    )
    squarehead: float = Field(
        1.0,
        ge=0,
        description="Weight of the distance from the teacher's hidden states after each layer, normalized by their size.",
    )
    divergence: Divergence = Field(
        "forward_kl", description="Divergence between the distributions of teacher and student that `kl` weighs."
    )
    temperature: float = Field(1.0, gt=0, le=100, description="Softmax temperature of teacher and student.")
    teacher: Literal["memory", "cached"] = Field(
        "memory",
        description="The model before all stages, in memory as a whole; or what it gives for all rows computed first, one block in memory "
        "at a time, and read from the disk.",
    )
    teacher_top: int = Field(
        64, ge=1, description="Likeliest tokens of a position that a cached teacher keeps, with the mass of all others."
    )
    samples: int = Field(
        512, ge=8, le=1_000_000, description="Rows of calibration text; an eighth, 64 at most, is held out."
    )
    sequence_length: int = Field(256, ge=16, le=1_048_576, description="Tokens of a row.")
    steps: int = Field(400, ge=1, le=10_000_000, description="Updates at most.")
    batch_size: int = Field(8, ge=1, le=65_536, description="Rows of an update, over all processes together.")
    micro_batch: int | None = Field(
        None, ge=1, description="Rows of one forward pass; none: all that a process has of an update."
    )
    learning_rate: float = Field(2e-4, gt=0, le=1, description="At its height, after the warmup.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Of matrices.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of forward passes; auto: bfloat16 on GPUs that have it. Weights that are trained are float32.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, a third more time."
    )
    evaluate_every: int = Field(50, ge=1, description="Updates between looks at the held-out rows.")
    patience: int | None = Field(
        5, ge=1, description="Looks in a row without a gain that end the training; none: it goes on to the last step."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of the order of rows and of all that is random.")

    @model_validator(mode="after")
    def _something_to_learn(self) -> RecoverConfig:
        if not self.cross_entropy + self.kl + self.squarehead:
            raise ValueError("cross_entropy, kl and squarehead are all 0: there is nothing to learn")
        return self

    @property
    def adapter(self) -> Adapter | None:
        """The low-rank change that is trained in the place of weights; None: weights are."""
        return None
