"""Ternary dictionary: hostile matrices come back, the dictionary and its parse, sizes, scales, damaged streams by name, recipes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch

from compress.quantize import METHODS, candidate_schemes, resolve_scheme
from runtime import formats
from runtime.errors import ArtifactError, RequestError
from runtime.formats.presets import PRESETS
from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.formats.ternary_dictionary import MOST, NONZERO, TernaryDictionary, dictionary

STORAGE = formats.get("ternary_dictionary")
CHECKSUM = 0x5C19DC07
FORM = TernaryDictionary()
SHAPES = [(1, 1), (1, 64), (9, 1), (3, 2), (5, 27), (4, 28), (4, 29), (2, 4097), (33, 1001), (700, 2001)]


def random_codes(shape: tuple[int, int], zeros: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * (torch.rand(shape, generator=generator) >= zeros)).to(torch.int8)


def matrices(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    runs = random_codes(shape, 0.5).repeat_interleave(75, 1)[:, : shape[1]]
    return {
        **{f"{zeros:.0%} zeros": random_codes(shape, zeros, shape[1]) for zeros in (0.0, 0.5, 0.9, 0.995, 1.0)},
        "one sign": -random_codes(shape, 0.7).abs(),
        "no zero, one sign": torch.ones(shape, dtype=torch.int8),
        "long runs": runs.contiguous(),
    }


def packed(codes: torch.Tensor) -> Tensors:
    scales = {"scale": (torch.rand(len(codes), 1) + 0.5).bfloat16()}
    return STORAGE.pack(CompressedWeight.of(codes, scales, None, Scheme(FORM), torch.bfloat16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hostile_matrices_come_back(shape: tuple[int, int]) -> None:
    for name, codes in matrices(shape).items():
        tensors = packed(codes)
        again = STORAGE.unpack(tensors, Scheme(FORM), shape, torch.bfloat16, "layer")
        assert torch.equal(again.values, codes), name
        assert torch.equal(again.own["scale"], tensors["weight_scale"])
        rows = torch.arange(shape[0]).flip(0)[: max(1, shape[0] // 2)]
        chosen = STORAGE.select_rows(tensors, Scheme(FORM), shape, rows)
        assert torch.equal(
            STORAGE.unpack(chosen, Scheme(FORM), (len(rows), shape[1]), torch.bfloat16).values, codes[rows]
        )


def test_matrices_without_rows_or_columns() -> None:
    for shape in ((0, 5), (3, 0)):
        tensors = packed(torch.zeros(shape, dtype=torch.int8))
        assert STORAGE.unpack(tensors, Scheme(FORM), shape, torch.bfloat16).values.shape == shape


def test_the_dictionary_never_changes() -> None:
    """Every artifact of this format is written with it."""
    words = dictionary()
    assert zlib.crc32(words.astype("<i8").tobytes()) == CHECKSUM
    assert len(set(words.tolist())) == len(words) == 1 << 16


def test_words_are_the_cheapest_and_parts_of_words_are_words() -> None:
    words = dictionary()
    length, weights = words >> 56, words[:, None] >> 2 * np.arange(MOST) & 3
    assert set(length.tolist()) == set(range(2, MOST + 1, 2))
    assert not (weights == 3).any()
    assert not ((weights > 0) & (np.arange(MOST) >= length[:, None])).any()
    cost = length + (NONZERO - 1) * (weights > 0).sum(1)
    assert (np.diff(cost) >= 0).all()
    known = {(int(size), *row[:size].tolist()) for size, row in zip(length, weights, strict=True)}
    for size, *row in known:
        if size > 2:
            assert (size - 2, *row[:-2]) in known
            assert (size - 2, *row[2:]) in known


@pytest.mark.parametrize("zeros", [0.2, 0.6, 0.885, 0.97])
def test_rows_have_as_few_words_as_possible(zeros: float) -> None:
    """Against dynamic programming over all ways to write a row."""
    codes = random_codes((6, 90), zeros)
    counts = packed(codes)["weight_row_offsets"].diff()
    words = dictionary()
    known = {(word >> 56, word & (1 << 56) - 1) for word in words.tolist()}
    for row, count in zip(codes.tolist(), counts.tolist(), strict=True):
        best = [0] + [len(row)] * len(row)
        for end in range(2, len(row) + 1, 2):
            for start in range(max(0, end - MOST), end, 2):
                bits = sum((0, 1, 2)[code] << 2 * place for place, code in enumerate(row[start:end]))
                if (end - start, bits) in known:
                    best[end] = min(best[end], best[start] + 1)
        assert count == best[-1]


@pytest.mark.parametrize("zeros", [0.6, 0.8, 0.885, 0.95])
def test_the_estimate_is_what_independent_weights_take(zeros: float) -> None:
    shape, form = (256, 4096), TernaryDictionary(zeros)
    tensors = packed(random_codes(shape, zeros))
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert STORAGE.bytes_estimate(Scheme(form), shape, torch.bfloat16) == pytest.approx(size, rel=0.01)
    assert 8 * tensors["weight_codes"].nbytes / codes_in(shape) == pytest.approx(form.bits, rel=0.01)
    assert (8 * size / codes_in(shape) < 1) == (zeros > 0.85)


def codes_in(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


@pytest.mark.parametrize("zeros", [0.5, 0.885, 0.97])
def test_scales_leave_as_many_zeros_as_asked(zeros: float) -> None:
    form, weight = TernaryDictionary(zeros), torch.randn(64, 4096, generator=torch.Generator().manual_seed(3))
    parameters = form.fit(weight, torch.bfloat16)
    codes = form.round(weight, parameters)
    assert float((codes == 0).float().mean()) == pytest.approx(zeros, abs=0.005)
    value, code = form.nearest(weight.T[5:6], parameters, 5)
    assert torch.equal(code, codes[:, 5])
    assert torch.equal(value[0], form.dequantize(codes, parameters, torch.float32)[:, 5])


def test_less_is_lost_than_with_levels_at_the_extremes() -> None:
    """The paper's grid, of the smallest and the largest weight of a row, beside ours with as many zeros."""
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(4))
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    theirs = torch.where(weight > high / 2, high, torch.where(weight < low / 2, low, 0))
    form = TernaryDictionary(float((theirs == 0).float().mean()))
    parameters = form.fit(weight, torch.float32)
    ours = form.dequantize(form.round(weight, parameters), parameters, torch.float32)
    assert (ours == 0).sum() >= 0.998 * (theirs == 0).sum()
    assert (weight - ours).square().sum() < 0.9 * (weight - theirs).square().sum()


@pytest.mark.parametrize("zeros", [0.1, 0.5, 0.95])
def test_weights_that_are_ternary_already_stay_as_they_are(zeros: float) -> None:
    weight = random_codes((40, 300), zeros) * (torch.rand(40, 1) + 0.01).bfloat16().float()
    parameters = FORM.fit(weight, torch.bfloat16)
    assert torch.equal(FORM.dequantize(FORM.round(weight, parameters), parameters, torch.float32), weight)


def test_rows_of_zeros_of_one_sign_and_of_few_weights() -> None:
    weight = torch.randn(5, 100)
    weight[0], weight[1], weight[2] = 0, weight[1].abs(), -weight[2].abs()
    weight[3, 1:], weight[4, :] = 0, 2.5
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        parameters = FORM.fit(weight, dtype)
        assert parameters["scale"].dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
        codes = FORM.round(weight, parameters)
        back = FORM.dequantize(codes, parameters, torch.float32)
        assert back.isfinite().all()
        assert not codes[0].any()
        assert (codes[1] >= 0).all()
        assert (codes[2] <= 0).all()
        assert back[3, 0] == weight[3, 0].to(parameters["scale"].dtype)
        assert (back[4] == 2.5).all()
        assert not FORM.nearest(torch.randn(1, 5), parameters, 0)[1][0], "a scale of zero stands for zeros alone"


def damaged(tensors: Tensors, name: str, change: Any) -> Tensors:
    tensor = tensors[name].clone()
    change(tensor)
    return tensors | {name: tensor}


@pytest.mark.parametrize("columns", [60, 61])
def test_damaged_tensors_are_named(columns: int) -> None:
    good = packed(random_codes((16, columns), 0.9))
    words, wide = dictionary(), int(np.flatnonzero(dictionary() == MOST << 56)[0])
    last = int(good["weight_row_offsets"][1]) - 1
    length = words >> 56
    alike = length == length[int(good["weight_codes"][last]) & 0xFFFF]
    ending = np.flatnonzero(alike & (words >> 2 * (length - 1) & 3 > 0))[:1].astype(np.uint16).view(np.int16)
    other = damaged(good, "weight_codes", lambda t: t[last].fill_(int(ending[0])))  # its last weight is not zero
    cases = {
        "weight_codes": [
            damaged(good, "weight_codes", lambda t: t[0].fill_(0 if length[int(t[0]) & 0xFFFF] > 2 else wide)),
            good | {"weight_codes": torch.randint(-(1 << 15), 1 << 15, good["weight_codes"].shape).to(torch.int16)},
        ],
        "weight_row_offsets": [
            damaged(good, "weight_row_offsets", lambda t: t[-1].add_(1)),
            damaged(good, "weight_row_offsets", lambda t: t[0].sub_(1)),
            damaged(good, "weight_row_offsets", lambda t: t[3].fill_(1 << 30)),
            damaged(good, "weight_row_offsets", lambda t: t[3].fill_(-(1 << 31))),
            good | {"weight_codes": good["weight_codes"][:-1]},
            good | {"weight_codes": good["weight_codes"][:0]},
        ],
    }
    if columns % 2:
        cases["weight_codes"].append(other)
    else:
        STORAGE.unpack(other, Scheme(FORM), (16, columns), torch.bfloat16)
    for name, every in cases.items():
        for bad in every:
            with pytest.raises(ArtifactError, match=rf"layer\.{name}"):
                STORAGE.unpack(bad, Scheme(FORM), (16, columns), torch.bfloat16, "layer")


def quantize(method: str = "gptq", **fields: Any) -> Any:
    return METHODS[method].config(**{"scheme": "TERNARY", **fields})


def test_what_a_recipe_may_say() -> None:
    assert resolve_scheme(quantize()) == PRESETS["TERNARY"] == Scheme(TernaryDictionary(0.885))
    represented = {"representation": "ternary_dictionary", "zeros": 0.8}
    assert resolve_scheme(quantize(scheme=represented)) == Scheme(TernaryDictionary(0.8))
    for fields, said in (
        ({"bits": 2}, "has a fixed bits"),
        ({"activations": "int8"}, "weight-only"),
        ({"scales": "minmax"}, "scales applies to grids only"),
        ({"scheme": {**represented, "zeros": 1.0}}, r"zeros of ternary_dictionary are 1\.0"),
        ({"scheme": {**represented, "words": 3}}, "words"),
    ):
        with pytest.raises(RequestError, match=said):
            resolve_scheme(quantize(**fields))
    with pytest.raises(RequestError, match="depends on the weights"):
        candidate_schemes(quantize(scheme=None, bits=4.5, candidates=[4, "TERNARY"]))
    assert "31 bits" in str(FORM.why_not((1 << 17, 1 << 16)))
