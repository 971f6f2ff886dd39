"""Search of scales and zero points for weights on a grid.

A scale is rounded to the dtype it is stored in before anything is rounded to the grid, so that what the solver sees is what the
runtime computes. A symmetric grid has one code more on one side (`-8..7` for 4 bits); its scale may therefore be negative, which
points the longer side at the larger extreme of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from compress.core import file_matrix, native
from compress.quantize import super_blocks
from runtime.formats.block_float import BlockFloat
from runtime.formats.grid import GridScheme, Rounding
from runtime.formats.k_quant import KQuant
from runtime.formats.representation import Representation
from runtime.formats.scheme import CompressedWeight, Scheme

#: Elements that are searched at a time: small enough to stay in the cache in torch; C takes care of that by itself.
CHUNK, NATIVE_CHUNK = 1 << 17, 1 << 21
Search = Literal["mse", "minmax", "hessian", "positive"]


@dataclass
class Grid:
    """Scales and zero points fitted to a weight.

    Attributes:
        scheme: bits, type, strategy, group size.
        scale: float32 `[rows, groups]`, representable in the storage dtype; rows is 1 for the tensor strategy, else out.
        zero: float32, shape of `scale`, integers in the signed code range, or the minima of k-quants; None when symmetric.
        dim: dimension of the weight's columns: 1 for weights `[out, in]`, 0 for transposed ones, whose scales are `[groups, rows]`.
    """

    scheme: GridScheme
    scale: torch.Tensor
    zero: torch.Tensor | None
    dim: int = 1

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Grid:
        """The grid with both scales and zero points changed."""
        return replace(self, scale=change(self.scale), zero=None if self.zero is None else change(self.zero))

    def __getitem__(self, place: Any) -> Grid:
        """Scales and zero points at some place."""
        return self.map(lambda parameter: parameter[place])

    @classmethod
    def joined(cls, grids: Sequence[Grid], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Grid:
        """One grid of several of one scheme; `join` puts their scales together, and their zero points."""
        zeros = [grid.zero for grid in grids if grid.zero is not None]
        return replace(grids[0], scale=join([grid.scale for grid in grids]), zero=join(zeros) if zeros else None)

    def put(self, place: Any, other: Grid) -> None:
        """Take over the scales and zero points of another grid at some place."""
        self.scale[place] = other.scale
        if self.zero is not None and other.zero is not None:
            self.zero[place] = other.zero

    def expand(self, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero point of every column, or such as broadcast to them."""
        spread = self.map(lambda parameter: self.scheme.spread(parameter, columns, self.dim))
        return spread.scale, spread.zero

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """Nearest codes of `weight` as float32 (fp8 grids: the fp8 values)."""
        return self.scheme.codes(weight, *self.expand(weight.shape[self.dim]))

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """Weights that `codes` stand for, float32."""
        return self.scheme.values(codes, *self.expand(codes.shape[self.dim]))

    def rows(self, index: slice | torch.Tensor) -> Grid:
        """The grid of some rows."""
        if self.dim == 1 and self.scheme.strategy == "tensor":
            return self
        return self[index] if self.dim == 1 else self[:, index]

    def group_of(self, columns: int) -> torch.Tensor:
        """Group of every column, `[in]`."""
        index = torch.arange(columns, device=self.scale.device)
        return index // self.scheme.width(columns)

    def weight(
        self, codes: torch.Tensor, mask: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> CompressedWeight:
        """A compressed weight of codes `[out, in]` (float32 or int8; fp8 grids: the fp8 values). Removed positions get the code of zero."""
        shape = self.scheme.parameter_shape((codes.shape[0], codes.shape[1]))
        if mask is not None:
            of_zero = self.expand(codes.shape[1])[1]
            of_zero = torch.zeros((), device=codes.device) if of_zero is None else of_zero
            codes = torch.where(mask, codes, of_zero.to(codes.dtype))
        stored = self.map(lambda parameter: parameter.reshape(shape))
        parameters = self.scheme.parameters_of(stored.scale, stored.zero, dtype)
        return CompressedWeight.of(codes.to(self.scheme.code_dtype), parameters, mask, scheme, dtype)


def make_grid(
    weight: torch.Tensor,
    scheme: GridScheme,
    dtype: torch.dtype,
    search: Search = "mse",
    importance: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    hessian: torch.Tensor | None = None,
) -> Grid:
    """Choose scales (and zero points).

    Args:
        weight: float32 `[out, in]`.
        scheme: the grid wanted.
        dtype: dtype the scale is stored in.
        search: `minmax` covers the range of every group; `mse` tries narrower and wider ranges, of both signs when symmetric,
            and keeps the one with the smallest weighted squared error; `hessian` weights by the output error of the group;
            `positive` is `mse` among positive scales.
        importance: `[in]` weights of the squared error, e.g. the mean square of the inputs; None = 1.
        mask: bool `[out, in]`, True = kept; removed weights have no say.
        hessian: `[in, in]`, for `hessian`.
    """
    out, columns = weight.shape
    group = scheme.unit(columns)
    rows = max(1, (NATIVE_CHUNK if native.usable(weight.T if weight.stride(0) == 1 else weight) else CHUNK) // group)
    if scheme.strategy == "tensor":
        return _tensor_grid(weight, scheme, dtype, search, importance, mask, rows)
    if importance is None and search != "hessian" and weight.is_contiguous() and columns % group == 0:
        # Groups are alike: those of one row after the other go together, as they lie in memory.
        kept = weight if mask is None else weight * mask
        parts = [search_groups(part, scheme, dtype, search, None) for part in kept.view(-1, group).split(rows)]
        return Grid.joined(parts, torch.cat).map(lambda parameter: parameter.reshape(out, -1))
    found = []
    for span in file_matrix.panels(columns, group):
        cost = None if importance is None else importance[span]
        if search == "hessian" and hessian is not None:
            cost = hessian[span, span].clone()
            file_matrix.let_go(hessian)
        parts = []
        for some in file_matrix.panels(out, rows):
            part = weight[some, span]
            if mask is not None:  # A removed weight is zero, which every grid has: it adds no error.
                part = part * mask[some, span]
            parts.append(search_groups(part, scheme, dtype, search, cost))
        found.append(Grid.joined(parts, torch.cat).map(lambda parameter: parameter.reshape(out, -1)))
    return Grid.joined(found, partial(torch.cat, dim=1))


def search_groups(
    groups: torch.Tensor, scheme: GridScheme, dtype: torch.dtype, search: Search, cost: torch.Tensor | None
) -> Grid:
    """Scale and zero point `[rows]` of groups `[rows, n]`; `cost`: weights `[n]` of the squared error, or its matrix `[n, n]`.

    Of k-quants, whose scales are chosen block by block: `[rows, groups]` of a block.
    """
    if isinstance(scheme, KQuant):

        def choose(part, scales, zeros, own):
            return best_candidate(part, Grid(scheme, scales, zeros), own)

        return Grid(scheme, *super_blocks.fit(groups, scheme, cost, choose, search != "minmax"))
    tried = candidate_grids(groups, scheme, dtype, search)
    if tried.scale.shape[0] == 1:
        return tried[0]
    best = best_candidate(groups, tried, cost)[None]
    return tried.map(lambda parameter: parameter.gather(0, best)[0])


def best_candidate(groups: torch.Tensor, tried: Grid, cost: torch.Tensor | None) -> torch.Tensor:
    """Index `[rows]` of the candidate with the smallest error, in C where that can be."""
    if (cost is None or cost.dim() == 1) and native.usable(groups.T if groups.stride(0) == 1 else groups):
        return native.search_grid(
            groups.T, cost, tried.scale, tried.zero, tried.scheme.code_range, tried.scheme.rounding
        )
    return search_candidates(groups, tried, cost)


def search_candidates(groups: torch.Tensor, tried: Grid, cost: torch.Tensor | None) -> torch.Tensor:
    """Index `[rows]` of the candidate with the smallest error; the first of equals."""
    (low, high), scales, zeros = tried.scheme.code_range, tried.scale, tried.zero
    groups = groups.contiguous()
    work, product = torch.empty_like(groups), torch.empty_like(groups)
    errors = torch.empty_like(scales)
    for i, scale in enumerate(scales):
        if tried.scheme.rounding == Rounding.MINIMUM and zeros is not None:
            codes = tried.scheme.codes(groups, scale[:, None], zeros[i][:, None], out=work)
            work = codes.mul_(scale[:, None]).sub_(zeros[i][:, None]).sub_(groups)
        else:
            tried.scheme.round_(torch.div(groups, scale[:, None], out=work))
            if zeros is None:
                work.clamp_(low, high)
            else:
                work.clamp_((low - zeros[i])[:, None], (high - zeros[i])[:, None])
            work.mul_(scale[:, None]).sub_(groups)
        if cost is None or cost.dim() == 1:
            errors[i] = work.square_().sum(1) if cost is None else work.square_() @ cost
        else:
            errors[i] = torch.mm(work, cost, out=product).mul_(work).sum(1)
    return errors.argmin(0)


def candidate_grids(groups: torch.Tensor, scheme: GridScheme, dtype: torch.dtype, search: str) -> Grid:
    """The grids that are tried for groups `[rows, n]`: scales and zero points `[candidates, rows]`, the range-covering one first."""
    low, high = scheme.code_range
    # Zero is always on the grid, so an all-positive group still starts at 0.
    least, most = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    extreme = torch.maximum(-least, most)
    if not scheme.integral:
        return Grid(scheme, scheme.storable(scheme.covering_scale(extreme)[None], dtype), None)
    levels = 2**scheme.bits
    tried = torch.tensor(shrinks(scheme.bits) if search != "minmax" else [], device=groups.device)[:, None]
    if isinstance(scheme, BlockFloat):
        # The largest value may also become 4 of 6 (Cook et al., Four Over Six, 2025), or something in between; powers of two have fewer.
        wider = tried.new_tensor([[1.5], [1.25]] if scheme.scales == "e4m3" else [[0.5], [2.0]])
        narrower = tried[1:] if scheme.scales == "e4m3" else tried[:0]
        others = torch.cat([wider, narrower]) if len(tried) else tried
        scales = scheme.covering_scale(extreme) * torch.cat([tried.new_ones(1, 1), others])
        return Grid(scheme, scheme.storable(scales, dtype), None)
    if scheme.symmetric:
        # The larger extreme is represented by the longer side (sign) and may be clipped (shrink).
        sign = torch.where(most > -least, -1.0, 1.0)
        longer, shorter = (sign * extreme) * (tried / -low), (-sign * extreme) * (tried / high)
        if search == "positive":
            longer, shorter = longer.abs(), shorter.abs()
        both = torch.stack([longer, shorter], dim=1).flatten(0, 1)
        return Grid(scheme, scheme.storable(torch.cat([extreme[None] / ((levels - 1) / 2), both]), dtype), None)
    tried = torch.cat([torch.ones(1, 1, device=groups.device), tried])
    scale = scheme.storable((most - least) * (tried / (levels - 1)), dtype)
    return Grid(scheme, scale, (low - least * tried / scale).round_().clamp_(low, high))


def shrinks(bits: int) -> list[float]:
    """Fractions of the range that are tried: few bits gain from much clipping, eight bits hardly."""
    least = {2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.75}.get(bits, 0.85)
    steps = 12
    return [1 - (1 - least) * i / steps for i in range(steps + 1)]


def _tensor_grid(weight, scheme, dtype, search, importance, mask, rows) -> Grid:
    """One scale for the whole weight: every candidate's error is summed over the rows."""
    kept = weight if mask is None else weight * mask
    extremes = torch.stack([kept.min(), kept.max()])[None]
    candidates = candidate_grids(extremes, scheme, dtype, search)
    tried = [candidates[i, :, None] for i in range(len(candidates.scale))]
    if len(tried) == 1:
        return tried[0]

    def error(grid: Grid) -> float:
        total = 0.0
        for part in kept.split(rows):
            square = (grid.values(grid.codes(part)) - part).square_()
            total += float((square if importance is None else square * importance).sum())
        return total

    return min(tried, key=error)


def nearest_values(
    weight: torch.Tensor,
    scheme: Representation,
    dtype: torch.dtype,
    importance: torch.Tensor | None = None,
    search: Search = "mse",
) -> torch.Tensor:
    """`weight [out, in]` rounded to the nearest values of any representation, float32; arguments as for `make_grid`."""
    if isinstance(scheme, GridScheme):
        grid = make_grid(weight, scheme.with_global_scale([weight]), dtype, search, importance)
        return grid.values(grid.codes(weight))
    parameters = scheme.fit(weight, dtype, importance)
    return scheme.dequantize(scheme.round(weight, parameters), parameters, torch.float32)
