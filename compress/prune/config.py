"""Fields that every pruning method has."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.core.method import ColumnLoop
from compress.prune.patterns import Pattern, parse


class PruneConfig(BaseModel):
    """Remove weights: what to remove is a pattern and a sparsity, which ones is the method's business."""

    model_config = ConfigDict(extra="forbid")

    method: str = Field(description="Name of the method, see `compress methods`.")
    pattern: str | None = Field(
        None, description="'unstructured', 'N:M' (N non-zeros in every M columns) or 'block:RxC'."
    )
    sparsity: float | None = Field(None, ge=0, lt=1, description="Fraction of zeros (N:M patterns fix it themselves).")
    targets: list[str] = Field(
        ["Linear"], description="Modules to prune: a class, a glob or 're:' and a regular expression."
    )
    ignore: list[str] = Field(["lm_head"], description="Modules to leave alone; same language as targets.")
    allocation: Literal["uniform", "owl", "error"] = Field(
        "uniform",
        description="How the sparsity is spread over layers: equally, by outliers (OWL, 2310.05175), or by layer error.",
    )

    @model_validator(mode="after")
    def _pattern_and_sparsity(self) -> PruneConfig:
        pattern, fixed = self.parsed, self.parsed.fixed_sparsity
        if fixed is not None:
            if self.sparsity is not None and abs(self.sparsity - fixed) > 1e-6:
                raise ValueError(f"pattern '{pattern}' means a sparsity of {fixed:g}, not {self.sparsity:g}")
            if self.allocation != "uniform":
                raise ValueError(f"pattern '{pattern}' has the same sparsity everywhere: allocation must be 'uniform'")
        elif self.sparsity is None:
            raise ValueError(f"pattern '{pattern}' needs 'sparsity', a number between 0 and 1")
        return self

    @property
    def parsed(self) -> Pattern:
        """The pattern, parsed."""
        return parse(self.pattern)

    @property
    def target_sparsity(self) -> float:
        """Fraction of zeros over all pruned weights."""
        fixed = self.parsed.fixed_sparsity
        assert fixed is not None or self.sparsity is not None
        return self.sparsity if fixed is None else fixed  # type: ignore[return-value]

    def column_loop(self) -> ColumnLoop | None:
        """Settings of the column loop that makes up for the method's error in the weights that remain; None: nothing is made up for."""
        return None
