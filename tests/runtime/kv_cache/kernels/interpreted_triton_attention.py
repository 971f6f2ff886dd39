"""Run by test_triton_attention.py with TRITON_INTERPRET=1: attention over compressed pages against `region_attention`."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import repair, watch

from runtime.kv_cache import kernels
from runtime.kv_cache.kernels import triton_attention
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Queries, Region, region_attention
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.bitmap import Bitmap
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain

repair()
watch()
CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def filled(
    pages: list[int], sizes: tuple[int, int], dtype: torch.dtype, keys: Codec, values: Codec, bias: bool = False
) -> Region:
    """A region whose rows have so many whole pages, in mixed order; what is free is as bad as it can be."""
    generator = torch.Generator().manual_seed(0)
    region = Region(len(pages), sizes, dtype, CPU, keys, values, bias)
    shift = 3 * torch.randn(1, 1, sizes[0], generator=generator)  # keys have channels that lie far from 0
    for part in (torch.tensor([count // 2 for count in pages]), torch.tensor([count - count // 2 for count in pages])):
        total = int(part.sum())
        states = [torch.randn(total, PAGE, size, generator=generator) for size in sizes]
        numbers = 2 * torch.randn(total, PAGE, generator=generator) if bias else None
        region.append_pages(region.encoded((states[0] + shift).to(dtype), states[1].to(dtype), numbers), part)
    return spoiled(region)


def ragged(lengths: list[int], sizes: tuple[int, int], dtype: torch.dtype) -> Region:
    """A plain region."""
    generator = torch.Generator().manual_seed(1)
    region = Region(len(lengths), sizes, dtype, CPU)
    states = [torch.randn(len(lengths), max(lengths), size, generator=generator).to(dtype) for size in sizes]
    region.append(region.encoded(*states), torch.tensor(lengths))
    return spoiled(region)


def spoiled(region: Region) -> Region:
    """Every slot that no token is in has bits that would be noticed."""
    count = region.pages
    used = torch.zeros(count + 2, PAGE, dtype=torch.bool)
    for row, length in enumerate(region.lengths.tolist()):
        for place in range(length):
            used[region.table[row, place // PAGE] + 1, place % PAGE] = True
    for name, pool in region.pools.items():
        grown = torch.full((count + 2, *pool.shape[1:]), 255, dtype=torch.uint8)
        if pool.is_floating_point():  # float8 with all bits set is not a number either
            grown = torch.full(grown.shape, float("nan")).to(pool.dtype)
        there = used.any(1) if region.parts[name].per_page else used
        grown[1:-1].view(torch.uint8).copy_(pool.view(torch.uint8))
        bad = (
            torch.full_like(grown, 255) if grown.dtype == torch.uint8 else torch.full_like(grown.float(), float("nan"))
        )
        region.pools[name] = torch.where(there.unsqueeze(-1), grown.float(), bad.float()).to(pool.dtype)
    region.table[region.table >= 0] += 1
    return region


def check(
    region: Region,
    queries: int,
    softcap: float = 0.0,
    visible: torch.Tensor | None = None,
    chosen: Chosen | None = None,
    of: torch.dtype | None = None,
) -> None:
    """Queries `of` another dtype than the region's floats are multiplied in float32."""
    generator = torch.Generator().manual_seed(2)
    rows, size = region.rows, region.sizes[0]
    wide = torch.randn(rows, queries + 1, size + 3, generator=generator).to(of or region.dtype)
    query = wide[:, :queries, :size]  # rows and heads with something between them
    assert triton_attention.why_not(query, region) is None
    found = triton_attention.run(Queries(query, size**-0.5, softcap), region, visible, chosen)
    rounded = region_attention(Queries(query, size**-0.5, softcap), region, visible, chosen)
    dtype, region.dtype = region.dtype, FP32
    computed = dtype if of in (None, dtype) else FP32
    exact = region_attention(Queries(query, size**-0.5, softcap), region, visible, chosen)
    largest = float(region.states()[1].abs().max())
    region.dtype = dtype
    for one, other, truth, unit in zip(found, rounded, exact, (largest, 1.0), strict=True):
        assert one.dtype == torch.float32
        nothing = truth == float("-inf")
        assert torch.equal(one == float("-inf"), nothing)
        error, allowed = ((x - truth).masked_fill(nothing, 0.0).abs().max() for x in (one, other))
        # No more than what rounding states to the model's dtype costs, and weights rounded to it.
        assert error <= 1.5 * allowed + unit * max(1e-6, torch.finfo(computed).eps), (float(error), float(allowed))


STORAGES: list[tuple[Codec, Codec, tuple[int, int], torch.dtype]] = [
    (Plain(), Plain(), (96, 80), BF16),
    (Plain(), Plain(), (24, 256), FP16),
    (Float8(), Float8(), (128, 64), BF16),
    (Float8(), Float8(), (64, 96), FP16),
    (Integer(4, "channel"), Integer(4, "token"), (128, 128), BF16),
    (Integer(4, "channel"), Integer(4, "token"), (80, 80), FP16),
    (Integer(8, "channel"), Integer(8, "token"), (96, 32), BF16),
    (Integer(2, "channel"), Integer(2, "token"), (32, 80), BF16),
    (Integer(2, "channel"), Integer(2, "token", 32), (80, 128), FP32),
    (Integer(4, "token"), Integer(8, "channel"), (64, 64), BF16),
    (Integer(8, "token", 24), Integer(2, "channel"), (80, 64), FP32),
    (Integer(4, "token", 64), Float8(), (160, 32), FP32),
    (Float8(), Integer(4, "token", 24), (32, 64), FP32),
    (Plain(), Integer(4, "token"), (64, 64), FP32),
    (Bitmap(0.5), Bitmap(0.7), (80, 64), BF16),
    (Integer(8, "channel"), Bitmap(0.5), (32, 20), FP32),
]


@pytest.mark.parametrize(
    "storage", STORAGES, ids=lambda s: f"{s[0].name}-{s[1].name}-{s[2][0]}-{s[2][1]}-{str(s[3])[6:]}"
)
def test_storages(storage: tuple[Codec, Codec, tuple[int, int], torch.dtype]) -> None:
    keys, values, sizes, dtype = storage
    check(filled([3, 0, 1], sizes, dtype, keys, values), 4)


@pytest.mark.parametrize(("of", "held"), [(FP32, BF16), (FP32, FP16), (BF16, FP32), (BF16, FP16)], ids=str)
def test_floats_in_another_dtype_than_the_models(of: torch.dtype, held: torch.dtype) -> None:
    """A model in float32 whose cache is held in few bytes above all."""
    lengths = torch.tensor([[70], [0], [33]]) - 3 + torch.arange(3)
    check(ragged([70, 0, 33], (24, 40), held), 3, 0.0, lengths, of=of)
    check(filled([3, 0, 1], (32, 48), held, Integer(4, "channel"), Integer(4, "token")), 4, of=of)
    check(filled([2, 1], (64, 32), held, Float8(), Bitmap(0.5)), 1, of=of)


def test_the_table_gives_them_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.KERNELS, "cpu", triton_attention.__name__)
    monkeypatch.setattr(kernels, "region_attention", None)  # what would compute instead
    query, region = torch.randn(2, 3, 32), ragged([40, 7], (32, 48), BF16)
    found, wanted = (call(Queries(query, 0.2), region) for call in (kernels.attend_region, triton_attention.run))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


FORMS = [
    (Plain(), Plain(), False),
    (Integer(4, "channel"), Integer(4, "token"), True),
    (Integer(8, "channel"), Integer(2, "token", 16), False),
    (Float8(), Float8(), True),
    (Bitmap(), Bitmap(), False),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f[1].name)
def test_what_is_chosen_and_visible(form: tuple[Codec, Codec, bool]) -> None:
    """Lists of pages and of tokens, with queries that see only the front of a row, a cap and biases."""
    keys, values, bias = form
    region = filled([4, 0, 2, 1], (32, 48), FP32, keys, values, bias)
    visible = torch.tensor([[1, 128, 70], [0, 0, 5], [64, 33, 0], [0, 0, 0]])
    check(region, 3, 2.0, visible)
    pages = Chosen(
        torch.tensor([[1, 3, 3], [0, 1, 2], [0, 1, 1], [0, 3, 3]]), torch.tensor([2, 0, 2, 2]), PAGE
    )  # a column that a row does not have counts as nothing
    check(region, 3, 0.0, None, pages)
    check(region, 3, 2.0, visible, pages)
    index = torch.full((4, 40), 127)
    index[0, :37] = torch.arange(0, 128)[torch.randperm(128, generator=torch.Generator().manual_seed(3))[:37].sort()[0]]
    index[2, :2] = torch.tensor([31, 32])
    tokens = Chosen(index, torch.tensor([37, 0, 2, 0]), 1)
    check(region, 3, 0.0, None, tokens)
    check(region, 3, 2.0, visible, tokens)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_ragged_rows_in_shares(dtype: torch.dtype) -> None:
    lengths = [300, 0, 1, 31, 32, 33, 257]
    region = ragged(lengths, (24, 40), dtype)
    assert triton_attention.splits(len(lengths), 10, 132) == 2
    check(region, 1)
    last = torch.tensor(lengths)[:, None] - 2 + torch.arange(3)  # the newest queries of a prompt see up to themselves
    check(region, 3, 0.0, last)
    index = torch.arange(300).expand(7, 300)
    check(region, 3, 0.0, None, Chosen(index, torch.tensor(lengths) // 2, 1))


def test_more_shares_than_a_row_has_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "LEAST_SHARE", 1)
    region = filled([16, 1, 0], (32, 32), BF16, Integer(4, "channel"), Integer(4, "token"))
    assert triton_attention.splits(3, 16, 132) == 16
    check(region, 2)


@pytest.mark.parametrize(("queries", "dtype"), [(17, BF16), (64, BF16), (70, FP16), (20, FP32)])
def test_many_queries(queries: int, dtype: torch.dtype) -> None:
    visible = torch.arange(queries).expand(2, queries) + 1
    check(filled([2, 1], (32, 32), dtype, Float8(), Integer(4, "token")), queries, 0.0, visible)


def test_small_scales_in_float16() -> None:
    """Weights times scale would be subnormal numbers."""
    region = filled([2], (32, 32), FP16, Integer(4, "channel"), Integer(8, "token"))
    for name in ("values.scale", "values.zero"):
        region.pools[name] = region.pools[name] / 4096
    query = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(4)).to(FP16)
    wanted, found = (f(Queries(query, 0.2), region)[0] for f in (region_attention, triton_attention.run))
    assert float((found - wanted).norm() / wanted.norm()) < 4e-3


def test_every_float8_comes_out() -> None:
    """All finite codes, subnormal ones among them."""
    region = Region(1, (16, 16), FP32, CPU, Plain(), Float8())
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.where(codes.isnan(), torch.zeros(256), codes.float()).to(torch.float8_e4m3fn)
    region.append_pages(region.encoded(*torch.zeros(2, 1, PAGE, 16)), torch.tensor([1]))
    region.pools["values.codes"][0, :16] = codes.view(16, 16)
    region.pools["values.scale"].fill_(0.5)
    for token in range(16):
        each = Chosen(torch.tensor([[token]]), torch.tensor([1]), 1)
        found = triton_attention.run(Queries(torch.zeros(1, 1, 16), 1.0), region, chosen=each)[0]
        assert torch.equal(found[0, 0], codes.view(16, 16)[token].float() / 2)


def test_nothing_there() -> None:
    region = Region(2, (32, 48), FP32, CPU)
    out, lse = triton_attention.run(Queries(torch.randn(2, 3, 32), 1.0), region)
    assert torch.equal(out, torch.zeros(2, 3, 48))
    assert torch.equal(lse, torch.full((2, 3), float("-inf")))
    none = Chosen(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), PAGE)
    assert torch.equal(
        triton_attention.run(Queries(torch.randn(2, 3, 32), 1.0), ragged([3, 5], (32, 48), FP32), chosen=none)[1], lse
    )
    assert triton_attention.run(Queries(torch.randn(2, 0, 32), 1.0), ragged([3, 5], (32, 48), FP32))[0].shape == (
        2,
        0,
        48,
    )


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    region = ragged([3], (32, 32), BF16)
    query = torch.zeros(1, 1, 32, dtype=BF16)

    class Other(Plain):
        name = "other"

    assert triton_attention.why_not(query, region) is None
    assert triton_attention.why_not(query.float(), region) is None
    assert "not queries in torch.float64" in str(triton_attention.why_not(query.double(), region))
    assert "not 300" in str(triton_attention.why_not(query, ragged([3], (32, 300), BF16)))
    assert "other" in str(triton_attention.why_not(query, Region(1, (32, 32), BF16, CPU, Plain(), Other())))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "CUDA" in str(triton_attention.why_not(query, region))
