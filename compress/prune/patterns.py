"""Sparsity patterns: unstructured, N:M, block. A pattern turns importances into a mask with exactly the wanted number of zeros."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from runtime.errors import RequestError


@dataclass(frozen=True)
class Pattern:
    """A sparsity pattern.

    `unstructured`: any positions. `n:m`: at most `n` non-zeros in every `m` consecutive columns. `block`: whole blocks of
    `rows x columns` weights are kept or removed.
    """

    kind: Literal["unstructured", "n:m", "block"]
    n: int = 0
    m: int = 1
    rows: int = 1
    columns: int = 1

    def __str__(self) -> str:
        return {"n:m": f"{self.n}:{self.m}", "block": f"block:{self.rows}x{self.columns}"}.get(self.kind, self.kind)

    @property
    def unit(self) -> int:
        """Consecutive columns that must stay together when columns are reordered."""
        return self.m if self.kind == "n:m" else self.columns

    @property
    def fixed_sparsity(self) -> float | None:
        """Fraction of zeros that N:M means; None of other patterns."""
        return 1 - self.n / self.m if self.kind == "n:m" else None

    def check(self, shape: tuple[int, int], name: str = "weight") -> None:
        """Raise `RequestError` when a weight of `shape` (out, in) cannot have this pattern."""
        out, columns = shape
        for side, size, unit in (("width", columns, self.unit), ("height", out, self.rows)):
            if size % unit:
                text = f"needs a {side} divisible by {unit}, the weight is {out} x {columns}"
                raise RequestError(f"{name}: pattern '{self}' {text}")

    def mask(self, score: torch.Tensor, sparsity: float, per_row: bool = False) -> torch.Tensor:
        """Keep the most important positions.

        Args:
            score: `[out, in]` importance, higher is kept.
            sparsity: fraction of zeros (ignored by N:M).
            per_row: unstructured only: every row has the same number of zeros.

        Returns:
            bool `[out, in]`, True = kept. Ties go to the later position, so the count is exact and the result deterministic.
        """
        if self.kind == "n:m":
            return keep_largest(score.reshape(-1, self.m), self.n).reshape(score.shape)
        if per_row and self.kind == "unstructured":
            return keep_largest(score, score.shape[1] - round(sparsity * score.shape[1]))
        return self.without(score, self.units(score.shape[0], score.shape[1], sparsity))

    def units(self, out: int, columns: int, share: float) -> int:
        """A share of the units (weights, or whole blocks) of a weight `[out, columns]`."""
        return round(share * ((out // self.rows) * (columns // self.columns)))

    def without(self, score: torch.Tensor, zeros: int) -> torch.Tensor:
        """The mask without the `zeros` least important units, wherever they are (unstructured, block)."""
        if self.kind == "unstructured":
            return keep_largest(score.reshape(1, -1), score.numel() - zeros).reshape(score.shape)
        out, columns = score.shape
        pooled = score.reshape(out // self.rows, self.rows, columns // self.columns, self.columns).sum((1, 3))
        kept = keep_largest(pooled.reshape(1, -1), pooled.numel() - zeros).reshape(pooled.shape)
        return kept.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)


def parse(text: str | None) -> Pattern:
    """Read `2:4`, `unstructured` (or None), `block:4x4`.

    Raises:
        RequestError: for anything else.
    """
    if text is None or text == "unstructured":
        return Pattern("unstructured")
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        n, m = int(match[1]), int(match[2])
        if 0 < n < m:
            return Pattern("n:m", n=n, m=m)
        raise RequestError(f"pattern '{text}': N:M keeps N of every M consecutive weights and needs 0 < N < M")
    if match := re.fullmatch(r"block:(\d+)x(\d+)", text):
        rows, columns = int(match[1]), int(match[2])
        if rows > 0 and columns > 0:
            return Pattern("block", rows=rows, columns=columns)
    raise RequestError(
        f"pattern '{text}' is unknown: give 'unstructured', 'N:M' such as '2:4', or 'block:RxC' such as 'block:4x4'"
    )


def keep_largest(score: torch.Tensor, keep: int) -> torch.Tensor:
    """Mask `[rows, n]` with exactly `keep` True in every row, at the largest scores (later positions win ties)."""
    n = score.shape[1]
    drop = n - keep
    if drop <= 0:
        return torch.ones_like(score, dtype=torch.bool)
    if keep <= 0:
        return torch.zeros_like(score, dtype=torch.bool)
    if n <= 64:
        # Few columns: a stable sort is exact and as fast as anything.
        order = score.argsort(dim=1, stable=True)
        return torch.ones_like(score, dtype=torch.bool).scatter_(1, order[:, :drop], False)
    threshold = score.kthvalue(drop, dim=1, keepdim=True).values
    kept = score > threshold
    tied = score == threshold
    # Of the tied scores, the first `missing` go too.
    missing = drop - (score < threshold).sum(1, keepdim=True)
    return kept | (tied & (tied.cumsum(1) > missing))
