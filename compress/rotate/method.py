"""Method of the stage `rotate`: its recipe fields, and the matrix that it turns a space by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator


class RotateConfig(BaseModel):
    """Rotate the hidden state and the values of every head by orthogonal matrices folded into the weights: the same function."""

    model_config = ConfigDict(extra="forbid")

    method: str = Field(description="Rotation matrices, see `compress methods`.")
    hidden: bool = Field(
        True,
        description="Rotate the hidden state (R1); the weights of norms are folded into the layers that read them.",
    )
    values: bool = Field(True, description="Rotate the values of every head (R2), where the attention allows it.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the random matrices.")

    @model_validator(mode="after")
    def _rotates_something(self) -> RotateConfig:
        if not (self.hidden or self.values):
            raise ValueError("hidden: false and values: false leave nothing to rotate")
        return self


@dataclass(frozen=True)
class Site:
    """Inputs of linear layers that a matrix rotates, over calibration text: what a norm of the hidden state gives, without its weights, or
    the values of all heads.

    Attributes:
        inputs: float32 `[tokens, in]`. rows: float32 `[n, in]`, some rows of the layers that read them, with the weights of the norm.
    """

    inputs: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class RotateMethod:
    """One method of `compress.rotate.METHODS`.

    Attributes:
        config: of its fields, the first of which, `method`, says its name. summary, paper: as of `compress.core.method.Method`.
        matrix: `(size, generator) -> [size, size]` float64, orthogonal.
        why_not: the reason it has none of a size; None: it has.
        learn: `(start [size, size], sites, config) -> ` a better matrix, float64 and orthogonal, which keeps the vector of equal numbers
            where `start` does; inputs of sites are whole pieces of that size. None: matrices do not depend on the model.
        cost: `(config, size) -> ` about as many multiplications as learning takes the time of.
        needs: what must be collected from calibration text.
    """

    config: type[RotateConfig]
    matrix: Callable[[int, torch.Generator], torch.Tensor]
    summary: str
    paper: str
    why_not: Callable[[int], str | None] = lambda _size: None
    learn: Callable[[torch.Tensor, Sequence[Site], Any], torch.Tensor] | None = None
    cost: Callable[[Any, int], float] = lambda _config, _size: 0.0
    needs: Collection[str] = ()

    @property
    def name(self) -> str:
        """As a recipe says it."""
        return str(self.config.model_fields["method"].default)
