"""Row codebooks: each row of a matrix has its own 4, 8 or 16 levels, and a code is the number of one of them.

The levels of a row are fitted by weighted k-means in one dimension, as in SqueezeLLM (Kim et al., 2024, arXiv 2306.07629), weighed by the
mean squares of the inputs: if gradients of outputs and inputs are independent, the Fisher information of a weight is their product, and
within a row only the inputs differ. Levels are integers of 8 bits times a scale, so that products with them are exact integers and a byte
shuffle looks them up. With `group_size`, groups of columns have scales of their own under the same levels (any4: Elhoushi and Johnson,
2025, arXiv 2507.04610). With `outliers`, some weights of every row are stored singly at full precision (SqueezeLLM's dense-and-sparse
split, with as many in each row).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.formats.bitpack import pack_rows, packed_words, row_slices, unpack_rows
from runtime.formats.cut import ROWS, Along
from runtime.formats.grid import scale_dtype
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec
from runtime.system import native
from runtime.system.row_threads import run_on_rows

REACH = 127  # of a level
MOST_OUTLIERS = 0.05
_COARSE = 63  # levels tried on either side of zero to find the range
_OUTLIER = 256  # codes from here on are outliers
_REFITS = 2  # of the scales of groups
_STEPS = 8  # of the least squares of levels
_NOTHING = 1e-6  # of a row's error: a gain not worth another step
_SLICE = 1 << 20  # elements of the search worked on at a time


@dataclass(frozen=True)
class RowCodebook(Representation):
    """Codes of 2 to 4 bits into the levels of their row, times a scale for the row or for each `group_size` columns of it.

    Codes are int8 `[out, in]`, numbers of levels. Parameters are `levels`, int8 `[out, 2^bits]`, ascending, and `scale` `[out, groups]`, in
    the model's dtype (float16 if that cannot hold scales). With outliers there is a third, `outlier_columns`, int16 `[out, count]`: the
    columns of each row that are outliers, ascending, as unsigned numbers. Codes are wider then, and that of an outlier is 256 + the bits of
    its value in the dtype of the scales.

    Attributes:
        bits: of a code: 2, 3 or 4.
        group_size: columns that share a scale, a multiple of 16; None: a row has one.
        outliers: fraction of the weights of every row that are stored singly at full precision, at most 0.05, but at least one weight;
            32 bits each in 16-bit models. Under `gptq` they make up for errors of other columns, as all weights do.
    """

    name = "row_codebook"
    row_by_row = True
    seconds = 0.6e-6
    refit_products = 6
    bits: int = 4
    group_size: int | None = None
    outliers: float = 0.0

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise ValueError(f"bits of row_codebook are {self.bits}, expected 2, 3 or 4")
        if self.group_size is not None and (self.group_size < 16 or self.group_size % 16):
            raise ValueError(f"group_size of row_codebook is {self.group_size}, expected a multiple of 16")
        if not 0 <= self.outliers <= MOST_OUTLIERS:
            raise ValueError(
                f"outliers of row_codebook are {self.outliers}, expected a fraction of 0 to {MOST_OUTLIERS}"
            )

    def why_not(self, shape: Shape) -> str | None:
        if self.group_size is not None and shape[1] % self.group_size:
            return f"rows of {shape[1]} weights are not whole groups of {self.group_size}"
        if self.outliers and shape[1] > 1 << 16:
            return f"outliers of row_codebook are among the first {1 << 16} columns, and there are {shape[1]}"
        return None

    def why_not_cut(self) -> str | None:
        return "`outliers` are not divided among ranks; compress with outliers: 0" if self.outliers else None

    def describe(self) -> str:
        group = "" if self.group_size is None else f" g{self.group_size}"
        return f"codebook {self.bits} bits{group}" + (
            f" with {100 * self.outliers:g} % outliers" if self.outliers else ""
        )

    def count(self, columns: int) -> int:
        """Outliers of a row."""
        return min(columns, max(1, round(self.outliers * columns))) if self.outliers and columns else 0

    # ---------------------------------------------------------------- what codes are
    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Levels and scales. Outliers are the weights whose rounding costs most, with levels that the largest weights did not draw away."""
        rows, columns = weight.shape
        cost = weight.new_ones(columns) if importance is None else importance.float().clamp(min=1e-12)
        mass = cost.expand(rows, columns)
        if not self.outliers:
            return self._fit(weight, dtype, mass)
        largest = (mass * weight.square()).topk(self.count(columns), dim=1).indices
        parameters = self._fit(weight, dtype, mass.scatter(1, largest, 0.0))
        values = self._values(self._numbers(weight, parameters), parameters)
        lost = mass * (weight - values).square()
        places = lost.topk(self.count(columns), dim=1).indices.sort(dim=1).values
        parameters = self._fit(weight, dtype, mass.scatter(1, places, 0.0))
        return parameters | {"outlier_columns": stored_columns(places)}

    def _fit(self, weight: torch.Tensor, dtype: torch.dtype, mass: torch.Tensor) -> Tensors:
        """Levels and scales where errors cost `mass` `[out, in]`."""
        columns = weight.shape[1]
        shape = (columns // self.group_size, self.group_size) if self.group_size else (1, columns)
        groups, weigh = weight.unflatten(1, shape), mass.unflatten(1, shape)
        spread = ((groups.square() * weigh).sum(-1) / weigh.sum(-1).clamp(min=1e-30)).sqrt()
        for last in [*[False] * (_REFITS if self.group_size else 0), True]:
            levels, unit = _fit_levels(groups, weigh, spread, 2**self.bits)
            parameters = {"levels": levels, "scale": (spread * unit[:, None]).to(scale_dtype(dtype))}
            if last:
                break
            numbers = self._numbers(weight, parameters)
            values = levels.float().gather(1, numbers.long()).view_as(groups)
            norm = (values.square() * weigh).sum(-1)
            spread = ((groups * values * weigh).sum(-1) / norm.clamp(min=1e-30)).clamp(min=0)
        return parameters

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = 0 if self.group_size is None else first // self.group_size
        levels, scale = parameters["levels"].float(), parameters["scale"][:, group].float()
        middle = (levels[:, 1:] + levels[:, :-1]) / 2
        units = columns[0] / scale.where(scale > 0, 1)
        codes = torch.searchsorted(middle, units[:, None])
        values = (levels.gather(1, codes) * scale[:, None])[:, 0]
        codes = codes[:, 0]
        if "outlier_columns" not in parameters:
            return values[None], codes.to(torch.int8)
        apart = (parameters["outlier_columns"] == _stored_column(first)).any(1)
        exact = columns[0].to(parameters["scale"].dtype)
        codes = torch.where(apart, _code_of(exact), codes)
        return torch.where(apart, exact.float(), values)[None], codes.to(_code_dtype(exact.dtype))

    def round(self, weight: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        codes = self._numbers(weight, parameters)
        if "outlier_columns" not in parameters:
            return codes
        exact = weight.gather(1, columns_of(parameters["outlier_columns"])).to(parameters["scale"].dtype)
        return self.with_outliers(codes, parameters, exact)

    def with_outliers(self, codes: torch.Tensor, parameters: Tensors, exact: torch.Tensor) -> torch.Tensor:
        """Codes `[out, in]` with those of the outliers, whose values are `exact` `[out, count]` in the dtype of the scales."""
        wide = _code_dtype(exact.dtype)
        return codes.to(wide).scatter_(1, columns_of(parameters["outlier_columns"]), _code_of(exact).to(wide))

    def _numbers(self, weight: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        """Numbers of the nearest levels, int8 `[out, in]`."""
        levels, scale, columns = parameters["levels"].float(), parameters["scale"].float(), weight.shape[1]
        middle = (levels[:, 1:] + levels[:, :-1]) / 2
        units = weight.unflatten(1, (scale.shape[1], columns // scale.shape[1])) / scale.where(scale > 0, 1)[..., None]
        return torch.searchsorted(middle, units.flatten(1)).to(torch.int8)

    def _values(self, numbers: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        """Float32 values of levels `numbers` `[out, in]`."""
        scale, columns = parameters["scale"].float(), numbers.shape[1]
        values = (
            parameters["levels"]
            .float()
            .gather(1, numbers.long())
            .unflatten(1, (scale.shape[1], columns // scale.shape[1]))
        )
        return (values * scale[..., None]).flatten(1)

    def refit(
        self,
        weight: torch.Tensor,
        codes: torch.Tensor,
        parameters: Tensors,
        moments: Callable[[torch.Tensor], torch.Tensor],
        energy: torch.Tensor,
    ) -> tuple[torch.Tensor, Tensors] | None:
        """Levels by least squares, outliers fixed: conjugate gradients, preconditioned by the diagonal, until little is left to gain.
        The scale follows the range of the levels.
        """
        levels, scale = parameters["levels"].float(), parameters["scale"].float()
        apart = None if codes.dtype == torch.int8 else codes >= _OUTLIER
        number = (codes if apart is None else codes.masked_fill(apart, 0)).long()
        unit = scale.repeat_interleave(weight.shape[1] // max(1, scale.shape[1]), 1)
        if apart is not None:
            unit = unit.masked_fill(apart, 0)

        def values(step: torch.Tensor) -> torch.Tensor:
            return step.gather(1, number) * unit

        def sums(of_columns: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(levels).scatter_add_(1, number, of_columns * unit)

        error = weight - self.dequantize(codes, parameters, torch.float32)
        inverse = sums(unit * energy).clamp(min=1e-30).reciprocal()
        slope = moments(error)
        enough = _NOTHING * (error * slope).sum(1, keepdim=True)
        rest = sums(slope)
        moved, direction = torch.zeros_like(levels), inverse * rest
        norm = (rest * direction).sum(1, keepdim=True)
        for _ in range(min(2**self.bits, _STEPS)):
            # Were H its diagonal, `norm` would be what is left to gain. Rows stop one by one: none depends on those beside it.
            going = norm > enough
            if not going.any():
                break
            along = sums(moments(values(direction)))
            size = going * norm / (direction * along).sum(1, keepdim=True).clamp(min=1e-30)
            moved += size * direction
            rest -= size * along
            again = inverse * rest
            norm, before = (rest * again).sum(1, keepdim=True), norm
            direction = again + norm / before.clamp(min=1e-30) * direction
        found, places = (levels + moved).sort(dim=1)
        # A level beyond the range widens it; the scale is rounded first, and levels suit the rounded one.
        widest = found.abs().amax(1, keepdim=True) / REACH
        widened = (scale * torch.where(widest > 0, widest, 1)).to(parameters["scale"].dtype)
        used = scale > 0  # groups of zeros have no scale to widen
        ratio = (widened.float() / scale.where(used, 1)).sum(1, keepdim=True) / used.sum(1, keepdim=True).clamp(min=1)
        found = (found / ratio.where(ratio > 0, 1)).round_().clamp_(-REACH - 1, REACH).to(torch.int8)
        number = places.argsort(dim=1).gather(1, number)
        codes = number.to(codes.dtype) if apart is None else torch.where(apart, codes, number.to(codes.dtype))
        return codes, {**parameters, "levels": found, "scale": widened}

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        (rows, columns), scale = codes.shape, parameters["scale"]
        wide = torch.promote_types(scale.dtype, dtype)
        levels, out = parameters["levels"].to(wide), torch.empty(rows, columns, dtype=dtype, device=codes.device)
        for start, stop in row_slices(rows, columns, _SLICE):
            part, own = codes[start:stop], scale[start:stop]
            apart = None if part.dtype == torch.int8 else part >= _OUTLIER
            number = part if apart is None else part.masked_fill(apart, 0)
            values = (
                levels[start:stop].gather(1, number.long()).unflatten(1, (own.shape[1], columns // own.shape[1]))
                * own[..., None]
            )
            out[start:stop] = values.flatten(1)
            if apart is not None:
                out[start:stop][apart] = _value_of(part[apart], scale.dtype).to(dtype)
        return out

    # ---------------------------------------------------------------- on disk
    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        (rows, columns), scale = shape, scale_dtype(dtype)
        groups = 1 if self.group_size is None else columns // self.group_size
        along = None if self.group_size is None else Along(1, self.group_size)
        found = {
            "weight_packed": TensorSpec(
                (rows, packed_words(columns, self.bits)), torch.int32, (ROWS, Along.words(1, self.bits))
            ),
            "weight_levels": TensorSpec((rows, 2**self.bits), torch.int8, (ROWS, None)),
            "weight_scale": TensorSpec((rows, groups), scale, (ROWS, along)),
        }
        if self.outliers:
            count = self.count(columns)
            found["weight_outlier_columns"] = TensorSpec((rows, count), torch.int16)
            found["weight_outliers"] = TensorSpec((rows, count), scale)
        return found

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        found, half = {}, 2 ** (self.bits - 1)
        if "outlier_columns" in parameters:
            places = columns_of(parameters["outlier_columns"])
            found["weight_outlier_columns"] = parameters["outlier_columns"]
            found["weight_outliers"] = _value_of(codes.gather(1, places), parameters["scale"].dtype)
            codes = codes.scatter(1, places, 0).to(torch.int8)
        return {
            "weight_packed": pack_rows(codes - half, self.bits),
            "weight_levels": parameters["levels"],
            "weight_scale": parameters["scale"],
            **found,
        }

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        codes = unpack_rows(tensors["weight_packed"], self.bits, shape[1]) + 2 ** (self.bits - 1)
        parameters = {"levels": tensors["weight_levels"], "scale": tensors["weight_scale"]}
        if not self.outliers:
            return codes, parameters
        parameters["outlier_columns"] = tensors["weight_outlier_columns"]
        return self.with_outliers(codes, parameters, tensors["weight_outliers"]), parameters

    def find_corruption(self, tensors: Tensors, shape: Shape) -> tuple[str, str] | None:
        if (tensors["weight_levels"].short().diff(dim=1) < 0).any():
            return "weight_levels", "has a row whose levels are not in ascending order"
        if not self.outliers:
            return None
        places = columns_of(tensors["weight_outlier_columns"])
        if (places >= shape[1]).any() or (places.diff(dim=1) <= 0).any():
            return "weight_outlier_columns", f"has a row that does not name columns below {shape[1]} in ascending order"
        return None


# Outliers: columns are unsigned numbers in int16, codes are the bits of the values.


def stored_columns(places: torch.Tensor) -> torch.Tensor:
    """Numbers of columns as they are stored, int16."""
    return torch.where(places >= 1 << 15, places - (1 << 16), places).to(torch.int16)


def _stored_column(place: int) -> int:
    return place - (1 << 16) if place >= 1 << 15 else place


def columns_of(stored: torch.Tensor) -> torch.Tensor:
    """Inverse of `stored_columns`, int64."""
    return stored.long() & 0xFFFF


def _code_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of codes that hold outliers of `dtype`."""
    return torch.int32 if dtype.itemsize == 2 else torch.int64


def _code_of(exact: torch.Tensor) -> torch.Tensor:
    """Codes of outliers, int64."""
    bits, mask = (torch.int16, 0xFFFF) if exact.dtype.itemsize == 2 else (torch.int32, 0xFFFFFFFF)
    return (exact.view(bits).long() & mask) + _OUTLIER


def _value_of(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `_code_of`."""
    bits, size = (torch.int16, 16) if dtype.itemsize == 2 else (torch.int32, 32)
    number = codes.long() - _OUTLIER
    return torch.where(number >= 1 << size - 1, number - (1 << size), number).to(bits).view(dtype)


# The levels of a row: weighted k-means, exact over the integers of a range that a coarse pass finds (over all real numbers: Wang and Song,
# 2011, Ckmeans.1d.dp).


def _fit_levels(
    groups: torch.Tensor, mass: torch.Tensor, spread: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels, int8 `[rows, count]`, and what one of them counts, float32 `[rows]`, for `groups` `[rows, groups, size]` over their `spread`.

    The range is that of the best levels on a coarser scale of the whole range of the weights.
    """
    points = (groups / spread.where(spread > 0, 1)[..., None]).flatten(1)
    weigh = (mass * spread.square()[..., None]).flatten(1)
    weigh = weigh / weigh.sum(1, keepdim=True).clamp(min=1e-30)
    widest = torch.where(weigh > 0, points.abs(), 0).amax(1) if points.shape[1] else points.sum(1)
    unit = widest.clamp(min=1e-12) / _COARSE
    coarse = best_levels(points / unit[:, None], weigh, count, _COARSE)
    unit = unit * (coarse.abs().amax(1) + 0.5).clamp(max=_COARSE) / REACH
    return best_levels(points / unit[:, None], weigh, count, REACH).to(torch.int8), unit


def best_levels(points: torch.Tensor, mass: torch.Tensor, count: int, reach: int = REACH) -> torch.Tensor:
    """The integers `-reach` to `reach` whose nearest to `points` `[rows, n]` are off by the least `sum(mass (point - level)^2)`, exactly.

    Between two neighbouring levels a < b, points below their middle go to a. With P0 and P1 the sums of mass and of mass times point up to
    there, what a level costs is a difference of terms at its two ends, so that the cost of all is a sum over neighbours:
    `sum (b - a) (2 P1 - (a + b) P0)` at each middle, plus `last^2 P0 - 2 last P1` at the end. Dynamic programming finds the least.

    Returns:
        int64 `[rows, count]`, ascending; `count` different ones.
    """
    rows, choices = len(points), 2 * reach + 1
    found = torch.empty(rows, count, dtype=torch.long, device=points.device)
    middles = torch.arange(-2 * reach, 2 * reach + 1, device=points.device, dtype=torch.float64)
    for start, stop in row_slices(rows, max(points.shape[1], choices), _SLICE):
        part, weigh = points[start:stop].double(), mass[start:stop].double()
        # Bins of half a level; the middle number h, half an integer, lies behind the bins below h.
        place = (2 * (part + reach)).floor_().clamp_(0, 2 * choices - 3).long()
        sums = part.new_zeros(2, stop - start, 2 * choices - 1)
        sums[0].scatter_add_(1, place + 1, weigh)
        sums[1].scatter_add_(1, place + 1, weigh * part)
        below = sums.cumsum_(-1)
        turn = (2 * below[1] - middles * below[0]).float().contiguous()
        ends = below[:, :, -1].T.float().contiguous()
        found[start:stop] = _search(turn, ends, count)
    return found


def _search(turn: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Dynamic programming: `turn` `[rows, 2 choices - 1]` is `2 P1 - (a + b) P0` at each middle, `ends` `[rows, 2]` P0 and P1 of all."""
    rows, choices = len(turn), turn.shape[1] // 2 + 1
    library = _library() if turn.device.type == "cpu" else None
    if library is not None:
        found = torch.empty(rows, count, dtype=torch.long)
        run_on_rows(rows, library.levels_search, turn, ends, choices // 2, count, found)
        return found
    step = max(1, 4 * _SLICE // choices**2)
    parts = [_search_in_torch(*part, count) for part in zip(turn.split(step), ends.split(step), strict=True)]
    return torch.cat(parts) if parts else turn.new_empty(0, count).long()


def _search_in_torch(turn: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """`_search` as `row_codebook.c` does it."""
    rows, choices = len(turn), turn.shape[1] // 2 + 1
    number = torch.arange(choices, device=turn.device)
    gap = (number - number[:, None]).float()  # [from, to]
    step = turn.as_strided((rows, choices, choices), (turn.shape[1], 1, 1)) * gap
    step.masked_fill_(gap <= 0, torch.inf)
    total, origins = turn.new_zeros(rows, choices), list[torch.Tensor]()
    for _ in range(count - 1):
        total, origin = (step + total[:, :, None]).min(1)
        origins.append(origin)
    level = (number - choices // 2).float()
    here = (total + level.square() * ends[:, :1] - 2 * level * ends[:, 1:]).argmin(1, keepdim=True)
    found = [here]
    for origin in reversed(origins):
        found.append(here := origin.gather(1, here))
    return torch.cat(found[::-1], 1) - choices // 2


@cache
def _library() -> ctypes.CDLL | None:
    return native.library(Path(__file__).with_suffix(".c"))
