"""SparseGPT: prune column by column and let the later columns make up for it (Frantar and Alistarh 2023, 2301.00774)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compress.core.method import ColumnLoop, Method
from compress.prune.config import PruneConfig


class SparseGPTConfig(PruneConfig):
    """Choose what to remove by the exact cost of removing it, and update the remaining weights (the GPTQ column loop).

    Together with `gptq` in one recipe this is one pass over one Hessian: the error of rounding the kept weights is
    compensated along with the error of the removed ones.
    """

    method: Literal["sparsegpt"] = Field("sparsegpt", description="Name of the method.")
    damping: float = Field(0.01, gt=0, le=1, description="Added to the Hessian's diagonal, as a fraction of its mean.")
    order: Literal["activation", "natural"] = Field(
        "activation", description="Columns by activation energy, or as they are."
    )
    mask_search: Literal["exact", "greedy"] = Field(
        "exact",
        description="N:M: compare all ways to choose at their exact cost, or take one weight after the other (the paper).",
    )
    swaps: int = Field(
        1, ge=0, le=100, description="N:M: passes that move zeros inside a block where that lowers the output error."
    )
    reconstruction: int = Field(
        10, ge=0, le=1000, description="Conjugate-gradient steps that fit the kept weights once the mask is complete."
    )
    block_size: int = Field(
        128, ge=8, le=4096, description="Columns whose updates are applied together, and masked together."
    )

    def column_loop(self) -> ColumnLoop:
        keys = {"damping", "order", "mask_search", "swaps", "reconstruction", "block_size"}
        return ColumnLoop(**self.model_dump(include=keys))


METHOD = Method(
    name="sparsegpt",
    config=SparseGPTConfig,
    summary="removes weights by exact cost and updates the others",
    paper="Frantar and Alistarh, SparseGPT, 2023, arXiv 2301.00774",
    needs=frozenset({"hessian", "ranges"}),
)
