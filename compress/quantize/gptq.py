"""GPTQ: round column by column and let the later columns make up for it (Frantar et al. 2022, 2210.17323)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from compress.core.method import DEFAULTS, ColumnLoop, Method
from compress.quantize.config import QuantizeConfig

_LOOP = {"damping", "order", "block_size", "scales", "static_groups", "sweeps", "refit_scales", "joint"}


class GPTQConfig(QuantizeConfig):
    """Round one column of weights after the other; the columns to come are shifted so that the layer's output error stays small.

    The output error of a row is never above that of rounding to nearest: where it would be, the nearest values are kept.
    """

    best_fields: ClassVar[Mapping[str, Any]] = {"objective": "output", "sweeps": 4}

    method: Literal["gptq"] = Field("gptq", description="Name of the method.")
    damping: float = Field(0.01, gt=0, le=1, description="Added to the Hessian's diagonal, as a fraction of its mean.")
    order: Literal["activation", "group", "natural"] = Field(
        "group",
        description="Order of the columns: by activation energy with static groups; whole groups by energy; or as they are.",
    )
    block_size: int = Field(128, ge=8, le=4096, description="Columns whose updates are applied together.")
    static_groups: bool = Field(
        False,
        description="Fix all scales beforehand, instead of fitting a group when the loop arrives at it (if the order allows).",
    )
    sweeps: int = Field(
        1, ge=0, le=100, description="Refinement passes that re-optimize one code at a time to lower the output error."
    )
    refit_scales: bool = Field(True, description="Refit scales of grids by least squares in every refinement pass.")
    joint: bool = Field(
        True, description="With sparsegpt in the same recipe: prune and round in one pass (false: one after the other)."
    )

    def column_loop(self, base: ColumnLoop = DEFAULTS) -> ColumnLoop:
        return replace(base, **self.model_dump(include=_LOOP))


METHOD = Method(
    name="gptq",
    config=GPTQConfig,
    summary="rounds column by column and compensates the error",
    paper="Frantar et al., GPTQ, 2022, arXiv 2210.17323",
    needs=frozenset({"hessian", "ranges"}),
)
