"""The grids of weights that are solved together, transposed like the weights: `[groups, rows of all weights]`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.quantize.grid import Search, make_grid, round_fp8
from runtime.scheme import WeightScheme


@dataclass
class StackedGrid:
    """`scale` and `zero` (None when symmetric) float32 `[groups, rows]`; the tensor strategy repeats its scale for every row."""

    scheme: WeightScheme
    scale: torch.Tensor
    zero: torch.Tensor | None

    @classmethod
    def fit(
        cls,
        weights: list[torch.Tensor],
        scheme: WeightScheme,
        dtype: torch.dtype,
        search: Search,
        masks: list[torch.Tensor] | None,
        importance: torch.Tensor,
        hessian: torch.Tensor,
    ) -> StackedGrid:
        """Grids of float weights `[out_i, in]`, each by itself (see `make_grid`)."""
        grids = [
            make_grid(w, scheme, dtype, search, importance, None if masks is None else masks[i], hessian)
            for i, w in enumerate(weights)
        ]
        heights = [w.shape[0] for w in weights]
        scale = torch.cat([g.scale.T.expand(-1, h) for g, h in zip(grids, heights, strict=True)], dim=1).contiguous()
        zeros = [g.zero.T.expand(-1, h) for g, h in zip(grids, heights, strict=True) if g.zero is not None]
        return cls(scheme, scale, torch.cat(zeros, dim=1).contiguous() if zeros else None)

    def rows(self, index: torch.Tensor) -> StackedGrid:
        """A copy of the grid of some rows."""
        return StackedGrid(self.scheme, self.scale[:, index], None if self.zero is None else self.zero[:, index])

    def group_of(self, columns: int) -> torch.Tensor:
        """Group of every column, `[in]`."""
        if self.scheme.strategy != "group":
            return torch.zeros(columns, dtype=torch.long, device=self.scale.device)
        assert self.scheme.group_size is not None
        return torch.arange(columns, device=self.scale.device) // self.scheme.group_size

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """Nearest codes of `weight [in, rows]`, float32 (fp8 grids: the fp8 values)."""
        group = self.group_of(weight.shape[0])
        codes = weight / self.scale[group]
        if self.scheme.type == "float":
            return round_fp8(codes)
        codes.round_()
        if self.zero is not None:
            codes += self.zero[group]
        return codes.clamp_(*self.scheme.code_range)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """Weights that `codes [in, rows]` stand for."""
        group = self.group_of(codes.shape[0])
        return (codes if self.zero is None else codes - self.zero[group]) * self.scale[group]
