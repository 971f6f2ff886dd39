"""Attention over compressed pages in C, against float64 over the same decoded states and against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.kv_cache import kernels
from runtime.kv_cache.kernels import attend_region, cpu
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Queries, Region, region_attention
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.bitmap import Bitmap
from runtime.kv_cache.storage.fp8 import Float8
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain
from runtime.system import native

STORAGES: dict[str, Codec] = {
    "plain": Plain(),
    "int2 channel": Integer(2, "channel"),
    "int4 channel": Integer(4, "channel"),
    "int8 channel": Integer(8, "channel"),
    "int2 token": Integer(2, "token"),
    "int4 token": Integer(4, "token"),
    "int8 token": Integer(8, "token"),
    "int2 groups": Integer(2, "token", 32),
    "int4 groups": Integer(4, "token", 32),
    "int8 groups": Integer(8, "token", 16),
    "int4 odd groups": Integer(4, "token", 12),
    "fp8": Float8(),
    "bitmap": Bitmap(0.5),
}
HEADS = (1, 3, 4, 8, 17)
SIZES = (8, 20, 40, 64, 80, 128)
needs_compiler = pytest.mark.skipif(cpu.load() is None, reason="no C compiler, or it is switched off")


@pytest.fixture(autouse=True)
def _seed():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def region_of(
    keys: Codec,
    values: Codec,
    lengths: list[int],
    sizes: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
) -> Region:
    """Random states, rows ragged; what no row uses is poisoned: NaN, and 255 in bytes."""
    region = Region(len(lengths), sizes, dtype, torch.device("cpu"), keys, values, bias)
    pages = torch.tensor([-(-length // PAGE) for length in lengths])
    count = int(pages.sum())
    offset = torch.randn(sizes[0]) * 2  # keys have channels far from zero
    states = (torch.randn(count, PAGE, sizes[0]) + offset).to(dtype), torch.randn(count, PAGE, sizes[1]).to(dtype)
    order = torch.randperm(len(lengths))  # rows whose pages do not follow each other
    region.append_pages(region.encoded(*states, torch.randn(count, PAGE) if bias else None), pages)
    region.select_rows(order)
    region.select_rows(order.argsort())
    region.crop(torch.tensor(lengths))
    used = torch.zeros(region.pages, PAGE, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for column in range(-(-length // PAGE)):
            used[region.table[row, column], : min(PAGE, length - column * PAGE)] = True
    for name, pool in region.pools.items():
        if name.endswith("mask"):  # the codec's own decoding reads those of a page's unused slots too
            continue
        unused = ~used.any(1) if region.parts[name].per_page else ~used
        pool.view(torch.uint8)[unused] = 255  # a NaN of every float
    return region


def truth(
    query: torch.Tensor,
    region: Region,
    scale: float,
    softcap: float = 0.0,
    visible: torch.Tensor | None = None,
    chosen: Chosen | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, from states decoded to float32."""
    states = []
    for (side, codec), size in zip(region.codecs.items(), region.sizes, strict=True):
        parts = {name.partition(".")[2]: pool for name, pool in region.pools.items() if name.startswith(side)}
        states.append(codec.decode(parts, size, torch.float32).double())
    out = torch.zeros(*query.shape[:2], region.sizes[1], dtype=torch.float64)
    lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float64)
    for row, length in enumerate(region.lengths.tolist()):
        taken = range(length)
        if chosen is not None:
            index = set(chosen.index[row, : chosen.counts[row]].tolist())
            taken = [place for place in taken if place // chosen.unit in index]
        for q in range(query.shape[1]):
            seen = torch.tensor([p for p in taken if visible is None or p < visible[row, q]], dtype=torch.int64)
            if not len(seen):
                continue
            slots = region.table[row, seen // PAGE] * PAGE + seen % PAGE
            keys, values = (state.flatten(0, 1)[slots] for state in states)
            scores = keys @ query[row, q].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if region.has_bias:
                scores = scores + region.pools["bias"].view(-1)[slots].double()
            lse[row, q] = scores.logsumexp(0)
            out[row, q] = scores.softmax(0).nan_to_num(0.0) @ values
    return out, lse


def check(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], tolerance: float = 1e-5):
    for tensor, true in zip(found, wanted, strict=True):
        assert tensor.dtype == torch.float32
        assert tensor.shape == true.shape
        torch.testing.assert_close(tensor.double(), true.double(), rtol=tolerance, atol=tolerance)


def queries(region: Region, m: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(region.rows, m, region.sizes[0]).to(dtype)


@needs_compiler
@pytest.mark.parametrize(("keys", "values"), list(itertools.product(STORAGES, STORAGES)))
def test_every_pair_of_storages(keys, values):
    pair = list(STORAGES).index(keys) * len(STORAGES) + list(STORAGES).index(values)
    m, size = HEADS[pair % len(HEADS)], SIZES[pair // len(HEADS) % len(SIZES)]
    region = region_of(STORAGES[keys], STORAGES[values], [33, 0, 1, 150, 64], (size, size))
    query = queries(region, m)
    check(cpu.run(Queries(query, size**-0.5), region), truth(query, region, size**-0.5))


@needs_compiler
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_size(storage, size, portable):
    region = region_of(STORAGES[storage], STORAGES[storage], [70, 32], (size, size))
    for m in range(1, 6):
        query = queries(region, m)
        check(cpu.run(Queries(query, size**-0.5), region, portable=portable), truth(query, region, size**-0.5))


@needs_compiler
@pytest.mark.parametrize("m", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["plain", "bitmap", "int4 channel"])
def test_dtypes_of_model_and_query(storage, dtype, m):
    region = region_of(STORAGES[storage], STORAGES[storage], [45, 200], (64, 80), dtype)
    query = queries(region, m, dtype)
    check(cpu.run(Queries(query, 0.125), region), truth(query, region, 0.125))


@needs_compiler
@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("storage", ["plain", "int4 channel", "int4 groups", "fp8", "bitmap"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 6])
def test_softcap_bias_and_visible(storage, bias, softcap, m):
    region = region_of(STORAGES[storage], STORAGES["int4 groups"], [300, 5, 0, 64], bias=bias)
    query = queries(region, m) * 3
    visible = torch.randint(0, 310, (4, m))
    visible[3] = 0
    for seen in (None, visible):
        check(cpu.run(Queries(query, 0.125, softcap), region, seen), truth(query, region, 0.125, softcap, seen))


@needs_compiler
@pytest.mark.parametrize("unit", [PAGE, 1])
@pytest.mark.parametrize("storage", STORAGES)
def test_chosen(storage, unit):
    lengths = [300, 5, 0, 64, 1000]
    region = region_of(STORAGES[storage], STORAGES[storage], lengths)
    most = 40
    index, counts = torch.full((5, most), 7, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    for row, length in enumerate(lengths):
        units = -(-length // unit)
        taken = torch.randperm(units)[: min(units, most) * 2 // 3 + 1].sort().values
        index[row, : len(taken)], counts[row] = taken, len(taken)
    chosen = Chosen(index, counts, unit)
    for m in (1, 4, 7):
        query, visible = queries(region, m), torch.randint(0, 400, (5, m))
        for seen in (None, visible):
            check(cpu.run(Queries(query, 0.125), region, seen, chosen), truth(query, region, 0.125, 0.0, seen, chosen))


@needs_compiler
@pytest.mark.parametrize("unit", [PAGE, 1])
def test_chosen_may_be_none_at_all_or_named_twice(unit):
    region = region_of(STORAGES["int4 channel"], STORAGES["int4 groups"], [100, 70])
    query = queries(region, 4)
    for index in (torch.zeros(2, 0, dtype=torch.int64), torch.tensor([[0, 0, 2], [1, 1, 1]])):
        chosen = Chosen(index, torch.tensor([index.shape[1], 0]), unit)
        check(cpu.run(Queries(query, 0.125), region, chosen=chosen), truth(query, region, 0.125, chosen=chosen))


@needs_compiler
@pytest.mark.parametrize("storage", ["plain", "int4", "int2"])
def test_long_rows_and_threads(storage):
    codecs = (
        (Plain(), Plain()) if storage == "plain" else (Integer(int(storage[3]), "channel"), Integer(4, "token", 32))
    )
    for lengths in ([5003], [1, 4000, 33, 0, 700, 2048], [0, 0], [3] * 9):
        region = region_of(*codecs, lengths)
        visible = torch.randint(0, 5100, (len(lengths), 4))
        index = torch.arange(0, 5000, 3).expand(len(lengths), -1)
        some = Chosen(index, torch.full((len(lengths),), index.shape[1]), 1)
        query = queries(region, 4)
        for seen, chosen in ((None, None), (visible, None), (None, some)):
            wanted = truth(query, region, 0.125, 0.0, seen, chosen)
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                found = cpu.run(Queries(query, 0.125), region, seen, chosen)
                check(found, wanted)
                again = cpu.run(Queries(query, 0.125), region, seen, chosen)
                assert torch.equal(found[0], again[0])
                assert torch.equal(found[1], again[1])


@needs_compiler
def test_scores_of_minus_infinity():
    region = region_of(Plain(), Plain(), [70, 40, 33], bias=True)
    bias = region.pools["bias"]
    bias[region.table[0]] = float("-inf")  # all of row 0, the first page of row 1
    bias[region.table[1, 0]] = float("-inf")
    query = queries(region, 4)
    out, lse = cpu.run(Queries(query, 0.125), region)
    check((out, lse), truth(query, region, 0.125))
    assert not out[0].any()
    assert bool((lse[0] == float("-inf")).all())


@needs_compiler
def test_scores_far_apart():
    region = region_of(Plain(), Plain(), [500, 500])
    query = queries(region, 4) * 1000
    check(
        cpu.run(Queries(query, 1.0), region), truth(query, region, 1.0), 1e-4
    )  # scores of 1e4 have errors of 1e-3 in float32


@needs_compiler
def test_a_nan_is_not_lost():
    region = region_of(Plain(), Plain(), [40])
    query = queries(region, 2)
    query[0, 1, 3] = float("nan")
    out, lse = cpu.run(Queries(query, 0.125), region)
    check((out[:, :1], lse[:, :1]), truth(query[:, :1], region, 0.125))
    assert bool(lse[0, 1].isnan())


@needs_compiler
def test_cells_that_rows_add_one_by_one():
    region = Region(3, (64, 64), torch.bfloat16, torch.device("cpu"))
    for _ in range(70):
        region.append_one(region.encoded(*torch.randn(2, 3, 64).to(torch.bfloat16)))
    query = queries(region, 4)
    check(attend_region(Queries(query, 0.125), region), truth(query, region, 0.125))


@needs_compiler
def test_agrees_with_the_reference():
    region = region_of(STORAGES["int4 channel"], STORAGES["int2 groups"], [300, 40], (128, 128))
    query, visible = queries(region, 4), torch.randint(1, 300, (2, 4))
    assert cpu.why_not(query, region) is None
    check(
        attend_region(Queries(query, 0.1, 20.0), region, visible),
        region_attention(Queries(query, 0.1, 20.0), region, visible),
    )


@needs_compiler
def test_what_it_does_not_take():
    region = region_of(Plain(), Plain(), [40])
    query = queries(region, 2)
    assert "gradients" in cpu.why_not(query.clone().requires_grad_(), region)
    assert "float64" in cpu.why_not(query.double(), region)
    region.pools["keys.codes"] = region.pools["keys.codes"].expand(2, -1, -1, -1)[:, :, :, ::2]
    assert "contiguous" in cpu.why_not(query, region)


@needs_compiler
def test_tensors_that_do_not_fit_are_refused():
    region = region_of(Plain(), Plain(), [40, 3])
    query = queries(region, 2)
    for wrong in (query[:1], query[..., :32]):
        with pytest.raises(ValueError, match="queries"):
            cpu.run(Queries(wrong, 1.0), region)
    with pytest.raises(ValueError, match="visible"):
        cpu.run(Queries(query, 1.0), region, visible=torch.ones(2, 3, dtype=torch.int64))
    ones = torch.ones(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="counts"):
        cpu.run(Queries(query, 1.0), region, chosen=Chosen(ones, ones, 1))
    with pytest.raises(ValueError, match="unit"):
        cpu.run(Queries(query, 1.0), region, chosen=Chosen(ones, ones[:, 0], 8))


def test_without_a_compiler_the_reference_is_used(monkeypatch):
    monkeypatch.setenv("COMPRESS_NATIVE", "0")
    monkeypatch.setattr(cpu, "load", lambda portable=False: native._library.__wrapped__(cpu.SOURCE))
    region = region_of(STORAGES["int4 channel"], STORAGES["int4 groups"], [100, 0, 7])
    query = queries(region, 4)
    assert "COMPRESS_NATIVE" in cpu.why_not(query, region)
    out, lse = attend_region(Queries(query, 0.125), region)
    wanted = region_attention(Queries(query, 0.125), region)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


def test_the_log_says_once_why_plain_torch_computes(caplog, monkeypatch):
    region, other = region_of(Plain(), Plain(), [5, 40]), type("Other", (Plain,), {"name": "other"})()
    kernels.warn_once.cache_clear()
    attend_region(Queries(queries(region, 2), 0.125), region)
    assert not caplog.records, "a kernel computed"
    region.codecs["values"] = other
    for _ in range(3):
        attend_region(Queries(queries(region, 2), 0.125), region)
    (record,) = caplog.records
    assert "plain torch computes" in record.message
    assert "it does not know storage other" in record.message
    monkeypatch.delitem(kernels.KERNELS, "cpu")
    attend_region(Queries(queries(region, 2), 0.125), region)
    assert "there is no kernel for it" in caplog.records[-1].message
