"""Trellis codes: 16 weights in a word of 32 bits, from which shifts and two table lookups bring them back.

A trellis quantizer (Marcellin and Fischer, 1990; for language models QTIP, Tseng et al., 2024, arXiv 2406.11235) lets the codes of
neighbours overlap: a weight is decoded from a window of 8 bits, 6 of which it shares with the next, so that at 2 bits a weight there are
256 windows (53 distinct values) instead of 4 levels. For Gaussian weights the mean squared error is 8.7 % of the variance, and 11.8 %
for the Lloyd-Max quantizer with 4 levels. The trellis is tail-biting: the last windows of a word go on at its beginning. The value of a
window is the sum of two table entries, one for each nibble, which a byte shuffle looks up for many weights at a time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.formats.bitpack import row_slices
from runtime.formats.cut import ROWS, Along
from runtime.formats.grid import scale_dtype
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec
from runtime.system import native
from runtime.system.row_threads import run_on_rows

#: Value of a window: `LOW[its low nibble] + HIGH[its high nibble] - BASE`; made by `benchmarks/trellis_tables.py`. The tables are part of
#: the format, and `runtime/kernels/cpu/c/planes.h` has them too: with others every artifact would decode to noise.
LOW = (9, 33, 16, 21, 21, 12, 0, 28, 7, 13, 22, 30, 21, 21, 9, 0)
HIGH = (30, 10, 17, 13, 21, 10, 22, 25, 4, 18, 2, 14, 11, 26, 9, 10)
BASE = 32
UNIT = 11.5  # standard deviation of the normal distribution that the tables were made for
VECTOR, STATES, CHOICES = 16, 64, 4
#: `ORDER[t]`: column that window `t` decodes to. Byte `b` of the word rotated right by 0, 4, 2, 6 bits is column `b`, `4 + b`, `8 + b`,
#: `12 + b`: rotations by 0 and 4 (2 and 6) use the same nibbles.
ORDER = tuple(4 * (0, 2, 1, 3)[step % 4] + step // 4 for step in range(VECTOR))
TRIES = 8  # start states tried for a word, most promising first; 64 are all
_FIT_TRIES = 1  # the same while scales are fitted
_ROWS = 4096  # searched at a time in torch
_SLICE = 1 << 20  # weights dequantized at a time, so that they stay in the cache


@dataclass(frozen=True)
class Trellis(Representation):
    """Words of 16 weights times one scale for each `group_size` columns of a row.

    Codes are words, int32 `[out, in / 16]`. Window `t` is the low byte of the word, as uint32, rotated right by `2 t` bits; it decodes to
    column `ORDER[t]` of the 16. The parameter `scale` `[out, in / group_size]` has the model's dtype (float16 if that cannot hold scales).
    On disk they are `weight_words` and `weight_scale`.

    Attributes:
        group_size: columns that share a scale, a multiple of 16: 64 (2.25 bits a weight), 128 (2.13), ...
    """

    name = "trellis"
    row_by_row = True
    seconds = 1.2e-6
    bits = 2
    vector = VECTOR
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.group_size < VECTOR or self.group_size % VECTOR:
            raise ValueError(f"group_size of trellis is {self.group_size}, expected a multiple of {VECTOR}")

    def why_not(self, shape: Shape) -> str | None:
        if shape[1] % self.group_size:
            return f"rows of {shape[1]} weights are not whole groups of {self.group_size}"
        return None

    def describe(self) -> str:
        return f"trellis 2 bits g{self.group_size}"

    # ---------------------------------------------------------------- what codes are
    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Scales: from the root mean square of each group, refitted twice by least squares to the words found."""
        rows, columns = weight.shape
        groups = weight.view(rows, columns // self.group_size, self.group_size)
        cost = weight.new_ones(columns) if importance is None else importance.float().clamp(min=1e-12)
        mass = cost.view(-1, self.group_size)
        scale = ((groups.square() * mass).sum(-1) / mass.sum(-1)).sqrt() / UNIT
        for _ in range(2):
            parameters = {"scale": _storable(scale, dtype)}
            words = self._round(weight, parameters, cost, _FIT_TRIES)
            values = windows(words.flatten(), _values_on(weight.device)).T.reshape(groups.shape)
            along, norm = (groups * values * mass).sum(-1), (values.square() * mass).sum(-1)
            scale = (along / norm.clamp(min=1e-30)).clamp(min=0)
        return {"scale": _storable(scale, dtype)}

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        words, scale = self._words(columns, parameters, first, metric, TRIES)
        return windows(words, _values_on(columns.device)) * scale, words

    def round(self, weight: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        return self._round(weight, parameters, None, TRIES)

    def _round(self, weight: torch.Tensor, parameters: Tensors, cost: torch.Tensor | None, tries: int) -> torch.Tensor:
        words = []
        for first in range(0, weight.shape[1], VECTOR):
            columns = slice(first, first + VECTOR)
            metric = None if cost is None else cost[columns].diag()
            words.append(self._words(weight[:, columns].T, parameters, first, metric, tries)[0])
        return torch.stack(words, 1)

    def _words(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None, tries: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Words of columns `[16, rows]`, the `first` of the matrix and those after it, and their scales `[rows]`."""
        scale = parameters["scale"][:, first // self.group_size].float()
        return search(columns / scale.where(scale > 0, 1), metric, tries), scale

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        (rows, words), scale = codes.shape, parameters["scale"]
        wide = torch.promote_types(scale.dtype, dtype)
        values = _values_on(codes.device).to(wide)
        out = torch.empty(rows, words * VECTOR, dtype=dtype, device=codes.device)
        for start, stop in row_slices(rows, words * VECTOR, _SLICE if codes.device.type == "cpu" else 4 * _SLICE):
            part = windows(codes[start:stop].flatten(), values).T.reshape(stop - start, -1, self.group_size)
            torch.mul(part, scale[start:stop, :, None], out=out[start:stop].view_as(part))
        return out

    # ---------------------------------------------------------------- on disk
    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        rows, columns = shape
        return {
            "weight_words": TensorSpec((rows, columns // VECTOR), torch.int32, (ROWS, Along(1, VECTOR))),
            "weight_scale": TensorSpec(
                (rows, columns // self.group_size), scale_dtype(dtype), (ROWS, Along(1, self.group_size))
            ),
        }

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        return {"weight_words": codes, "weight_scale": parameters["scale"]}

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        return tensors["weight_words"], {"scale": tensors["weight_scale"]}


def _storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return scale.to(scale_dtype(dtype))


def window_values() -> torch.Tensor:
    """Value of every window, float32 `[256]`: integers of 6 bits."""
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    return (low + high[:, None] - BASE).flatten().float()


@cache
def _values_on(device: torch.device) -> torch.Tensor:
    return window_values().to(device)


def windows(words: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What words `[n]` stand for, by the value of a window: `[16, n]`, columns in the order of the weight."""
    bits = words.long() & 0xFFFFFFFF
    turned = 2 * torch.tensor(ORDER, device=words.device).argsort()[:, None]  # by column
    return values[(bits >> turned | bits << 32 - turned) & 255]


# The search. With errors `e` in step order, `e^T M e = sum_t cost_t (e_t + sum_{j<t} couple_tj e_j)^2`, so the cost of a step depends on
# earlier errors of the path. Viterbi keeps the cheapest path into each state together with its errors (per-survivor processing): exact
# without coupling, a heuristic with it. A tail-biting path ends in its start state, so starts are tried in the order of the cheapest
# uncoupled path through that state, up to `tries`.


def search(
    columns: torch.Tensor, metric: torch.Tensor | None = None, tries: int = TRIES, values: torch.Tensor | None = None
) -> torch.Tensor:
    """Words, int32 `[n]`, whose values are close to `columns`, float32 `[16, n]`, in units of the values.

    Args:
        metric: float32 `[16, 16]`, positive definite: errors cost `e^T metric e`; None: their squares.
        tries: how many states a word is begun from; 64 are all.
        values: of the 256 windows, float32; None: those of the tables.
    """
    device = columns.device
    values = _values_on(device) if values is None else values
    order = torch.tensor(ORDER, device=device)
    target, values = columns.float()[order].contiguous(), values.float().contiguous()  # C trusts what it is given
    cost, couple, single = torch.ones(VECTOR), torch.zeros(VECTOR, VECTOR), torch.ones(VECTOR)
    if metric is not None:
        own = metric[order][:, order].double()
        lower = torch.linalg.cholesky(own.flip(0, 1)).flip(0, 1).T  # metric = lower^T lower
        cost, couple = lower.diagonal().square().float(), (lower / lower.diagonal()[:, None]).tril(-1).float()
        single = own.diagonal().float()
    cost, couple, single = (part.contiguous().to(device) for part in (cost, couple, single))
    library = _library() if device.type == "cpu" else None
    if library is not None:
        words = torch.empty(target.shape[1], dtype=torch.int32)
        arguments = (target, target.shape[1], values, cost, couple, single, tries, words)
        run_on_rows(target.shape[1], library.trellis_search, *arguments, fewest=32)
        return words
    parts = target.split(_ROWS, dim=1)
    return torch.cat([_search(part, values, cost, couple, single, tries) for part in parts]) if parts else target.int()


def _search(
    target: torch.Tensor,
    values: torch.Tensor,
    cost: torch.Tensor,
    couple: torch.Tensor,
    single: torch.Tensor,
    tries: int,
) -> torch.Tensor:
    """`search` in torch, as `trellis.c` does it."""
    states = torch.arange(STATES, device=target.device)
    into = (
        CHOICES * states[:, None] + torch.arange(CHOICES, device=target.device)
    ) % STATES  # [state, choice]: where from
    of_window = values.view(STATES, CHOICES)
    count = target.shape[1]
    ahead, back = target.new_zeros(count, STATES), target.new_zeros(count, STATES)
    for step in range(VECTOR // 2, VECTOR):
        lost = single[step] * (target[step, :, None, None] - of_window).square()
        ahead = (ahead[:, into] + lost).amin(-1)
    for step in reversed(range(VECTOR // 2)):
        total = back[..., None] + single[step] * (target[step, :, None, None] - of_window).square()
        index = into.flatten().expand(count, -1)
        back = torch.full_like(back, torch.inf).scatter_reduce_(1, index, total.flatten(1), "amin")
    starts = (ahead + back).topk(tries, dim=1, largest=False, sorted=True).indices
    best, words = target.new_full((count,), torch.inf), torch.zeros(count, dtype=torch.long, device=target.device)
    for start in starts.T:
        state = target.new_full((count, STATES), torch.inf).scatter_(1, start[:, None], 0)
        errors, taken = target.new_zeros(count, 0, STATES), []
        for step in range(VECTOR):
            shift = torch.einsum("j,njs->ns", couple[step, :step], errors)
            off = (target[step, :, None] + shift)[:, into] - of_window
            state, choice = (state[:, into] + cost[step] * off.square()).min(-1)
            origin = into[states, choice]
            errors = errors.gather(2, origin[:, None].expand(-1, step, -1))
            own = off.gather(2, choice[..., None])[..., 0] - shift.gather(1, origin)
            errors = torch.cat((errors, own[:, None]), 1)
            taken.append(choice)
        lost, here = state.gather(1, start[:, None])[:, 0], start
        found = torch.zeros_like(words)
        for step in reversed(range(VECTOR)):
            choice = taken[step].gather(1, here[:, None])[:, 0]
            found |= choice << 2 * step
            here = (CHOICES * here + choice) % STATES
        words = torch.where(lost < best, found, words)
        best = torch.minimum(best, lost)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@cache
def _library() -> ctypes.CDLL | None:
    return native.library(Path(__file__).with_suffix(".c"))
