"""Training options: AdamW, its schedule, batches, early stopping and checkpoints; validated before anything is computed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainOptions(BaseModel):
    """A run of AdamW with a linear warmup and a cosine decay.

    Attributes:
        steps: at most.
        batch: rows of a step, over all processes together.
        micro_batch: rows of one forward pass; None: all that a process has of a step.
        learning_rate: at its height.
        warmup: share of the steps over which it rises.
        final_rate: what it falls to, as a share of its height.
        weight_decay: of matrices; vectors (norms, biases) have none.
        betas: of AdamW.
        clip: largest norm of all gradients together.
        precision: of forward passes. "auto": bfloat16 autocast on GPUs that have it, else float32. Weights and the loss are float32.
        evaluate_every: steps between measurements on held-out rows.
        patience: measurements in a row without a gain of `gain` that end the run; None: it goes on to the last step.
        gain: of the goal (`compress.distill.train.loop.Goal`).
        checkpoint_every: steps between checkpoints, where there is a directory for them.
        seed: of the order of rows and of all that is random.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    steps: int = Field(default=400, ge=1)
    batch: int = Field(default=8, ge=1)
    micro_batch: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    final_rate: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    clip: float = Field(default=1.0, gt=0)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    evaluate_every: int = Field(default=50, ge=1)
    patience: int | None = Field(default=5, ge=1)
    gain: float = Field(default=0.001, ge=0)
    checkpoint_every: int = Field(default=100, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @classmethod
    def of(cls, config: Any) -> TrainOptions:
        """Those of a stage's fields, the others by default; checkpoints are written as often as the student is evaluated."""
        known = {name: getattr(config, name) for name in cls.model_fields if hasattr(config, name)}
        return cls(**known, batch=config.batch_size, checkpoint_every=config.evaluate_every)

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ... as a share of its height."""
        rising = round(self.steps * self.warmup)
        if step < rising:
            return (step + 1) / (rising + 1)
        done = (step - rising) / max(1, self.steps - rising)
        return self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def describe(self) -> dict[str, Any]:
        """All that decides the result; runs may resume from each other where it is equal."""
        return self.model_dump(mode="json", exclude={"checkpoint_every"})
