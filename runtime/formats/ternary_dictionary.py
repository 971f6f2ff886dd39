"""Ternary weights in dictionary codes: below one bit a weight where most of them are zero (QMoE, Frantar and Alistarh, 2023,
arXiv 2310.16795).

A row has one scale, and its weights are that, its opposite or zero. Rows are written one by one in words of 16 bits, each of which stands
for an even number of weights, 2 to 28. The dictionary is fixed: the 65536 most likely sequences of independent weights. Every prefix and
every suffix of a word is a word too, so that taking the longest word at every step gives the fewest.

The paper's levels are the smallest and the largest weight of a row, and it rounds to the nearest. Here they are smaller, and the zone that
becomes zero is wider than half of them: at about as many bits that loses less (`benchmarks/ternary.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch

from runtime.formats.bitpack import row_slices, stream_of_rows
from runtime.formats.representation import Representation, Shape, Tensors, TensorSpec

WORDS, MOST = 1 << 16, 28  # of the dictionary, and weights of a word
#: When words are chosen, a weight that is not zero counts as much as so many zeros. With 23, which suits the paper's 88.5 % of zeros, the
#: same weights take 0.7 % more bits, and 22 % more where 70 % are zero. Part of the format: with another dictionary artifacts are noise.
NONZERO = 12
_SLICE = 1 << 20  # weights at a time


@dataclass(frozen=True)
class TernaryDictionary(Representation):
    """Weights that are zero or plus or minus the scale of their row, in words of 16 bits.

    Codes are int8 `[out, in]`: -1, 0 and 1. The parameter `scale` `[out, 1]` is float16 in models of float16 and bfloat16 in all others. On
    disk:

    - `weight_codes`: int16 `[count]`, numbers of words (unsigned), row after row; rows of an odd number of weights end with one more zero;
    - `weight_row_offsets`: int32 `[out + 1]`, where in them each row begins;
    - `weight_scale`: as above.

    Attributes:
        zeros: fraction of the weights that become zero if each is rounded by itself. Solvers that let later weights make up for the
            error of earlier ones leave fewer zeros, so more bits.
    """

    name = "ternary_dictionary"
    counted = "weight_codes"
    seconds = 0.1e-6
    #: Part of the scale up to which weights become zero: between 0.5, the nearest, and 0.79, where levels are means of what they stand for.
    #: 0.55 and 0.7 had higher KL divergence at as many bits than 0.6 and 0.65 (stdlib-4m, `gptq`).
    dead_zone: ClassVar[float] = 0.625
    zeros: float = 0.885

    def __post_init__(self) -> None:
        if not 0.4 <= self.zeros <= 0.99:
            raise ValueError(f"zeros of ternary_dictionary are {self.zeros}, expected a fraction of 0.4 to 0.99")

    @property
    def bits(self) -> float:  # type: ignore[override]
        """Of a weight, if so many are zero and they are independent."""
        return 16 / _word_length(self.zeros)

    @property
    def rows_apart(self) -> bool:
        return True

    def why_not(self, shape: Shape) -> str | None:
        if shape[0] * ((shape[1] + 1) // 2) >= 1 << 31:
            return f"a matrix of {shape[0]} x {shape[1]} weights may take more words than offsets of 31 bits can count"
        return None

    def describe(self) -> str:
        return f"ternary {100 * self.zeros:g} % zeros"

    # ---------------------------------------------------------------- what codes are
    def fit(self, weight: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None) -> Tensors:
        """Scales that leave as many zeros as asked, but none above the largest weight: rows that are ternary already stay as they are."""
        rows, columns = weight.shape
        if not columns:
            return {"scale": torch.zeros(rows, 1, dtype=ternary_scale_dtype(dtype), device=weight.device)}
        size = weight.abs()
        edge = size.kthvalue(min(columns, max(1, round(self.zeros * columns))), dim=1, keepdim=True).values
        most = size.amax(1, keepdim=True)
        scale = torch.where(edge > 0, (edge / self.dead_zone).minimum(most), most)
        return {"scale": scale.to(ternary_scale_dtype(dtype))}

    def nearest(
        self, columns: torch.Tensor, parameters: Tensors, first: int, metric: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = parameters["scale"][:, 0].float()
        codes = self._codes(columns[0], scale)
        return (codes * scale)[None], codes

    def round(self, weight: torch.Tensor, parameters: Tensors) -> torch.Tensor:
        return self._codes(weight, parameters["scale"].float())

    def _codes(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Codes, int8, of float32 weights; a scale of zero has none but zeros."""
        beyond = (weight.abs() > self.dead_zone * scale) & (scale > 0)
        return weight.sign().to(torch.int8) * beyond

    def dequantize(self, codes: torch.Tensor, parameters: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return codes.to(dtype) * parameters["scale"].to(dtype)

    # ---------------------------------------------------------------- on disk
    def expected_count(self, shape: Shape) -> int:
        return round(shape[0] * shape[1] / _word_length(self.zeros))

    def tensors(self, shape: Shape, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return self.tensors_for_count(shape, dtype, self.expected_count(shape))

    def tensors_for_count(self, shape: Shape, dtype: torch.dtype, count: int) -> dict[str, TensorSpec]:
        return {
            "weight_codes": TensorSpec((count,), torch.int16),
            "weight_row_offsets": TensorSpec((shape[0] + 1,), torch.int32),
            "weight_scale": TensorSpec((shape[0], 1), ternary_scale_dtype(dtype)),
        }

    def encode(self, codes: torch.Tensor, parameters: Tensors) -> Tensors:
        """The tensors, on the CPU."""
        given, (rows, columns) = codes.cpu().numpy(), codes.shape
        found, counts = [np.empty(0, np.int16)], np.zeros(rows + 1, np.int64)
        for start, stop in row_slices(rows, columns, _SLICE) if columns else ():
            words, counts[start + 1 : stop + 1] = _parse(given[start:stop])
            found.append(words)
        return {
            "weight_codes": torch.from_numpy(np.concatenate(found)),
            "weight_row_offsets": torch.from_numpy(counts.cumsum().astype(np.int32)),
            "weight_scale": parameters["scale"].cpu(),
        }

    def decode(self, tensors: Tensors, shape: Shape) -> tuple[torch.Tensor, Tensors]:
        words, offsets = tensors["weight_codes"], tensors["weight_row_offsets"]
        (rows, columns), device = shape, words.device
        weights, lengths = (table.to(device) for table in _tables())
        codes = torch.empty(shape, dtype=torch.int8, device=device)
        slices = row_slices(rows, columns, _SLICE)
        ends = offsets[[0, *(stop for _, stop in slices)]].tolist()  # one wait for the device
        place = torch.arange(MOST, device=device)
        for (start, stop), first, end in zip(slices, ends, ends[1:], strict=False):
            number = words[first:end].int() & 0xFFFF
            inside = place < lengths.index_select(0, number)[:, None]
            part = weights.index_select(0, number)[inside]
            codes[start:stop] = part.view(stop - start, -1)[:, :columns]
        return codes, {"scale": tensors["weight_scale"]}

    def select_rows(self, tensors: Tensors, shape: Shape, rows: torch.Tensor) -> Tensors:
        offsets, index = stream_of_rows(tensors["weight_row_offsets"].long(), rows)
        return {
            "weight_codes": tensors["weight_codes"][index],
            "weight_row_offsets": offsets.int(),
            "weight_scale": tensors["weight_scale"][rows],
        }

    def find_corruption(self, tensors: Tensors, shape: Shape) -> tuple[str, str] | None:
        words, offsets = tensors["weight_codes"], tensors["weight_row_offsets"].long()
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(words) or bool((offsets.diff() < 0).any()):
            return "weight_row_offsets", f"does not divide the {len(words)} words beside it into rows"
        weights, lengths = (table.to(words.device) for table in _tables())
        number = words.int() & 0xFFFF
        behind = torch.nn.functional.pad(lengths.index_select(0, number).cumsum(0), (1, 0))  # weights before each word
        if bool((behind[offsets].diff() != shape[1] + shape[1] % 2).any()):
            return "weight_codes", f"has a row that does not decode to {shape[1]} weights"
        if shape[1] % 2:
            last = number[offsets[1:] - 1]
            if bool((weights[last, lengths[last] - 1] != 0).any()):
                return "weight_codes", "has a weight beyond the last column"
        return None


def ternary_scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scales in a model of `dtype`: 16 bits are more than enough for ternary weights."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


# The dictionary, which C reads too. A word is an int64: two bits a weight from the lowest on (0, 1, or 2 for -1), and
# in the highest byte how many weights there are.


@cache
def dictionary() -> np.ndarray:
    """The words by their number, int64 `[65536]`: by ascending cost, of equal ones the shorter first, then by place of what is not zero."""
    cells = sorted(
        (length + count * (NONZERO - 1), length, count)
        for length in range(2, MOST + 1, 2)
        for count in range(length + 1)
    )
    found, room = list[np.ndarray](), WORDS
    for _, length, count in cells:
        every = list(itertools.islice(itertools.combinations(range(length), count), -(-room // 2**count)))
        places = np.array(every, np.int64).reshape(len(every), 1, count)
        signs = np.array(list(itertools.product((1, 2), repeat=count)), np.int64).reshape(1, 2**count, count)
        words = (length << 56) + (signs << 2 * places).sum(-1).flatten()[:room]
        found.append(words)
        room -= len(words)
        if not room:
            break
    return np.concatenate(found)


@cache
def word_table() -> torch.Tensor:
    """The dictionary as C reads it, int64 `[65536]`; to be left as it is."""
    return torch.from_numpy(dictionary())


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of each word, int8 `[65536, 28]`, and how many there are, int64 `[65536]`."""
    words = dictionary()
    weights = (words[:, None] >> 2 * np.arange(MOST) & 3).astype(np.int8)
    return torch.from_numpy(np.where(weights == 2, -1, weights).astype(np.int8)), torch.from_numpy(words >> 56)


@cache
def _longer() -> np.ndarray:
    """The word made of a word and a pair of weights, int32 `[65537, 16]`, -1: there is none. The last row begins a word."""
    words = np.append(dictionary(), 0)
    length = words >> 56
    pairs = np.arange(16)
    wanted = words[:, None] + (2 << 56) + (pairs << 2 * np.minimum(length, MOST - 2)[:, None])
    order = np.argsort(words[:-1])
    place = np.minimum(np.searchsorted(words[:-1], wanted, sorter=order), WORDS - 1)
    there = (words[:-1][order[place]] == wanted) & (length < MOST)[:, None]
    return np.where(there, order[place], -1).astype(np.int32)


def _parse(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of words, int16, that make up rows of codes, int8 `[rows, columns]`, and how many each has; rows take each step together."""
    rows, columns = codes.shape
    longer = _longer().ravel()
    both = np.pad(np.where(codes < 0, 2, codes), ((0, 0), (0, columns % 2))).astype(np.int32)
    pairs = np.ascontiguousarray((both[:, ::2] + 4 * both[:, 1::2]).T)
    ended = np.full((len(pairs), rows), -1, np.int32)
    word = np.full(rows, WORDS, np.int32)
    for step, pair in enumerate(pairs):
        following = longer[16 * word + pair]
        ends = np.flatnonzero(following < 0)
        if len(ends):
            ended[step - 1, ends] = word[ends]
            following[ends] = longer[16 * WORDS + pair[ends]]
        word = following
    ended[-1] = word
    by_row = ended.T
    there = by_row >= 0
    return by_row[there].astype(np.uint16).view(np.int16), there.sum(1)


@cache
def _word_length(zeros: float) -> float:
    """Weights of a word on average, if so many are zero and they are independent: of a sample."""
    place = np.random.default_rng(0).random((64, 8192))
    words, _ = _parse((place > (1 + zeros) / 2).astype(np.int8) - (place < (1 - zeros) / 2).astype(np.int8))
    return place.size / len(words)
