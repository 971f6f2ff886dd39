"""Trellis codes: what words mean, that the search finds the best, C and torch alike, sizes on disk, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from weight_cases import hostile_weights

from compress.quantize import METHODS, candidate_schemes, resolve_scheme
from compress.quantize.grid import nearest_values
from runtime import formats
from runtime.errors import ArtifactError, RequestError
from runtime.formats import trellis
from runtime.formats.grid import GridScheme
from runtime.formats.presets import PRESETS
from runtime.formats.quantization_config import ModuleEntry, build, parse
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.formats.trellis import BASE, HIGH, LOW, UNIT, Trellis, search, window_values, windows

STORAGE = formats.get("trellis")


def read(word: int) -> list[int]:
    """The 16 numbers of a word, bit by bit: windows go around its end."""
    bits = [word >> place & 1 for place in range(32)]
    numbers = [0] * 16
    for turned, byte in itertools.product((0, 2, 4, 6), range(4)):
        own = [bits[(turned + 8 * byte + place) % 32] for place in range(8)]
        low, high = (sum(bit << place for place, bit in enumerate(half)) for half in (own[:4], own[4:]))
        numbers[4 * (0, 4, 2, 6).index(turned) + byte] = LOW[low] + HIGH[high] - BASE
    return numbers


PINNED = [0, 0, 2, -6, 3, 11, 6, 27, -1, 7, -7, 10, -30, 10, -4, 2]


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(16, count, generator=torch.Generator().manual_seed(seed)) * UNIT


def metric(seed: int = 1) -> torch.Tensor:
    inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed))
    return inputs @ inputs.T / 40 + 0.1 * torch.eye(16)


def costs(columns: torch.Tensor, words: torch.Tensor, weighed: torch.Tensor) -> torch.Tensor:
    error = columns - windows(words, window_values())
    return (error * (weighed @ error)).sum(0)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "_library", lambda: None)


def test_words_are_read_as_described() -> None:
    words = torch.randint(-(2**31), 2**31, (50,)).int()
    words[:4] = torch.tensor([0, -1, 1, -(2**31)])
    found = windows(words, window_values())
    assert found.T.tolist() == [read(int(word) & 0xFFFFFFFF) for word in words]
    values = window_values()
    assert values.min() >= -32
    assert values.max() <= 31, "numbers of 6 bits"


def test_words_mean_what_they_always_have() -> None:
    """Artifacts are read with the tables they were written with."""
    word = torch.tensor([0x1234ABCD]).int()
    assert windows(word, window_values())[:, 0].tolist() == PINNED


@pytest.mark.parametrize("weighed", [False, True])
def test_what_a_word_can_hold_is_found(weighed: bool) -> None:
    words = torch.randint(-(2**31), 2**31, (40,), generator=torch.Generator().manual_seed(3)).int()
    columns = windows(words, window_values())
    found = search(columns, metric() if weighed else None, tries=64)
    assert torch.equal(windows(found, window_values()), columns)


def test_no_word_that_differs_in_three_bits_is_better() -> None:
    """The search over all states is exact where errors do not couple, so it leaves nothing to its neighbours."""
    columns, alike = normal(24), torch.eye(16)
    words = search(columns, tries=64)
    best = costs(columns, words, alike)
    for count in (1, 2, 3):
        for places in itertools.combinations(range(32), count):
            flip = sum(1 << place for place in places)
            other = words ^ torch.tensor(flip if flip < 1 << 31 else flip - (1 << 32)).int()
            assert bool((costs(columns, other, alike) >= best * (1 - 1e-5)).all())


def test_normal_numbers_lose_less_than_on_the_best_grid_of_four_values() -> None:
    columns, alike = normal(2048, 5), torch.eye(16)
    lost = {
        tries: float(costs(columns, search(columns, tries=tries), alike).mean() / 16 / UNIT**2) for tries in (1, 8, 64)
    }
    assert lost[64] <= lost[8] <= lost[1] < 0.1, lost
    assert 0.085 < lost[64] < 0.0885, "what the module says"
    assert lost[8] < 0.1175, "Lloyd and Max"


def test_errors_that_couple_are_weighed_together() -> None:
    columns = normal(256, 7)
    for seed in range(3):
        weighed = metric(seed)
        together = costs(columns, search(columns, weighed), weighed).mean()
        assert together < 0.93 * costs(columns, search(columns, weighed.diagonal().diag()), weighed).mean()


@pytest.mark.parametrize("tries", [1, 8, 64])
@pytest.mark.parametrize("weighed", [False, True])
def test_c_and_torch_find_the_same_words(monkeypatch: pytest.MonkeyPatch, tries: int, weighed: bool) -> None:
    if trellis._library() is None:
        pytest.skip("needs a C compiler")
    columns = normal(70, 11)
    columns[:, 1], columns[:, 2], columns[:, 3] = 0, 1e4, -1e-3
    own = metric(2) if weighed else None
    found = search(columns, own, tries)
    monkeypatch.setattr(trellis, "_library", lambda: None)
    other = search(columns, own, tries)
    alike = torch.eye(16) if own is None else own
    assert torch.allclose(costs(columns, found, alike), costs(columns, other, alike), rtol=1e-5)
    assert (found == other).float().mean() > 0.97, "but for ties"


def test_in_torch_alone(in_torch: None) -> None:
    test_what_a_word_can_hold_is_found(True)
    assert search(torch.empty(16, 0)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "group"), [((1, 16), 16), ((7, 96), 48), ((33, 256), 128)])
def test_what_is_stored_comes_back(shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    form, weight = Trellis(group), torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    scheme, parameters = Scheme(form), form.fit(weight, dtype)
    stored = CompressedWeight.of(form.round(weight, parameters), parameters, None, scheme, dtype)
    tensors = STORAGE.pack(stored)
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == STORAGE.bytes_estimate(scheme, shape, dtype)
    dense = STORAGE.unpack(tensors, scheme, shape, dtype).dequantize()
    assert dense.dtype == dtype
    assert torch.equal(dense, stored.dequantize())
    numbers = [[number for word in row for number in read(word & 0xFFFFFFFF)] for row in stored.values.tolist()]
    exact = torch.tensor(numbers).float() * parameters["scale"].float().repeat_interleave(group, 1)
    assert torch.equal(dense, exact.to(dtype))
    rows = torch.tensor([shape[0] - 1, 0])
    few = STORAGE.unpack(STORAGE.select_rows(tensors, scheme, shape, rows), scheme, (2, shape[1]), dtype)
    assert torch.equal(few.dequantize(), dense[rows])


def test_no_rows() -> None:
    form, empty = Trellis(16), torch.empty(0, 32)
    parameters = form.fit(empty, torch.bfloat16)
    assert form.dequantize(form.round(empty, parameters), parameters, torch.float32).shape == (0, 32)


def test_words_do_not_depend_on_threads_or_dtypes() -> None:
    columns = normal(700, 4).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = search(columns.float())
        torch.set_num_threads(3)
        assert torch.equal(search(columns.float()), alone)
        assert torch.equal(search(columns), alone)
        assert torch.equal(search(columns.double()), alone)
    finally:
        torch.set_num_threads(before)


def test_bits_a_weight() -> None:
    for group, bits in ((64, 2.25), (128, 2.125), (256, 2.0625)):
        assert STORAGE.bytes_estimate(Scheme(Trellis(group)), (64, 512), torch.bfloat16) * 8 == bits * 64 * 512


def test_rounding_is_closer_than_a_grid_of_as_many_bits() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    importance = torch.rand(256, generator=torch.Generator().manual_seed(1)) ** 3 + 0.01
    for own in (None, importance):
        mass = torch.ones(256) if own is None else own
        lost = [
            float(((nearest_values(weight, form, torch.bfloat16, own) - weight).square() * mass).sum())
            for form in (Trellis(64), GridScheme(2, "int", True, "group", 64), GridScheme(2, "int", False, "group", 64))
        ]
        assert lost[0] < 0.85 * min(lost[1:]), lost


def test_hostile_weights() -> None:
    weight = hostile_weights(16, 128)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = nearest_values(weight, Trellis(64), dtype)
        assert bool(found.isfinite().all())
        assert not found[1].any(), "a group of zeros is zeros"
        assert float((found[6:] - weight[6:]).norm() / weight[6:].norm()) < 0.6


def test_config_and_preset() -> None:
    form = Trellis(64)
    entry = ModuleEntry(Scheme(form), "trellis")
    assert parse(build({"a": entry}, ["a", "b"]), ["a", "b"])["a"] == entry
    assert PRESETS["W2A16_TRELLIS"] == Scheme(Trellis())
    fields = {"representation": "trellis", "group_size": 64}
    assert resolve_scheme(METHODS["gptq"].config(scheme=fields)) == Scheme(form)
    assert resolve_scheme(METHODS["rtn"].config(scheme="w2a16_trellis")) == Scheme(Trellis())


def test_candidates_of_a_budget_are_in_the_order_of_their_size() -> None:
    trellis = [{"scheme": {"representation": "trellis", "group_size": size}} for size in (64, 128)]
    config = METHODS["gptq"].config(bits=3.0, candidates=[3, *trellis, {"bits": 2, "group_size": 32}])
    names = [scheme.weights.describe() for scheme in candidate_schemes(config) if scheme.weights is not None]
    assert names == ["trellis 2 bits g128", "trellis 2 bits g64", "int2 g32", "int3 g128"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 24}, "group_size of trellis is 24, expected a multiple of 16"),
        ({"group_size": 0}, "group_size of trellis is 0"),
        ({"group_size": "channel"}, "group_size"),
        ({"states": 64}, "states"),
    ],
)
def test_fields_that_mean_nothing(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve_scheme(METHODS["gptq"].config(scheme={"representation": "trellis", **fields}))


def test_what_cannot_be_stored_and_what_is_damaged() -> None:
    with pytest.raises(RequestError, match="rows of 96 weights are not whole groups of 64"):
        formats.choose(Scheme(Trellis(64)), (8, 96))
    with pytest.raises(RequestError, match="dense weights only"):
        formats.choose(Scheme(Trellis(64), None, "2:4"), (8, 128))
    scheme, weight = Scheme(Trellis(64)), torch.randn(8, 128)
    parameters = Trellis(64).fit(weight, torch.bfloat16)
    codes = Trellis(64).round(weight, parameters)
    tensors = STORAGE.pack(CompressedWeight.of(codes, parameters, None, scheme, torch.bfloat16))
    for name in tensors:
        without = {key: tensor for key, tensor in tensors.items() if key != name}
        for damaged in (without, tensors | {name: tensors[name][:4]}, tensors | {name: tensors[name].to(torch.int16)}):
            with pytest.raises(ArtifactError, match=f"layer.{name}"):
                STORAGE.unpack(damaged, scheme, (8, 128), torch.bfloat16, "layer")
