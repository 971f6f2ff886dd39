"""Row codebooks and GGUF's types against plain torch: products, dequantization, and the classes of the dispatch table."""

import dataclasses

import pytest
import torch
import triton_references as references
from cases import assert_close, rows
from interpreted_linear import check
from weight_cases import random_weight

from runtime import formats
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.presets import preset
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.row_codebook import RowCodebook, stored_columns
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.kernels.base import Layer
from runtime.kernels.triton import layout
from runtime.kernels.triton.codebooks import KQuantTriton, RowCodebookTriton
from runtime.kernels.triton.matmul import dequantize, matmul
from runtime.kernels.triton.matvec import add_outliers, matvec

# (bits, group size, outliers), shape: less than a tile, nothing a multiple of a tile, a last word that is not full
CODEBOOKS = [
    ((2, None, 0.0), (3, 33)),
    ((3, 16, 0.0), (7, 176)),
    ((4, None, 0.0), (9, 149)),
    ((4, 48, 0.02), (17, 528)),
    ((2, None, 0.05), (5, 100)),
    ((3, 128, 0.001), (4, 256)),
]
SMALL = {"BLOCK_N": 4, "TILES": 2, "SPLIT_K": 3, "num_warps": 4}


def made(form, shape, dtype=torch.bfloat16, seed=0):
    """The kernel, what it prepared of a random weight (k-quants: with scales over their whole range), and its layer."""
    scheme = Scheme(form)
    stored = formats.choose(scheme, shape)
    weight = random_weight(scheme, shape, dtype, seed)
    if isinstance(form, KQuant):
        weight = dataclasses.replace(weight, own=weight.own | any_scales(form, shape, seed))
    tensors = stored.pack(weight)
    layer = Layer(ModuleEntry(scheme, stored.name), shape, dtype, torch.device("cpu"))
    kernel = (RowCodebookTriton if isinstance(form, RowCodebook) else KQuantTriton)("cpu")
    return kernel, kernel.prepare(tensors, layer), layer


def any_scales(form, shape, seed):
    """Integers from end to end, factors of both signs, some zero or subnormal."""
    generator, facts = torch.Generator().manual_seed(seed), form.facts

    def pair(factor, integers, low):
        d = (torch.randn(shape[0], shape[1] // facts.block, generator=generator) * 1e-3).half()
        d[0, 0], d[-1, -1] = 3e-7, 0
        found = torch.randint(
            low, facts.high + 1, (shape[0], shape[1] // facts.width), dtype=torch.int8, generator=generator
        )
        found[:2, :2] = torch.tensor([low, facts.high], dtype=torch.int8)
        return {factor: d, integers: found}

    return pair("d", "scale", facts.low) | ({} if form.symmetric else pair("dmin", "minimum", 0))


@pytest.mark.parametrize(("form", "shape"), CODEBOOKS, ids=str)
def test_row_codebooks(form, shape):
    for seed, dtype in enumerate((torch.bfloat16, torch.float16)):
        check(
            RowCodebookTriton("cpu"), Scheme(RowCodebook(*form)), shape, "row_codebook", dtype, seed, (0, 1, 2, 5, 70)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_k_quants(kind):
    for seed, (dtype, shape) in enumerate(
        ((torch.bfloat16, (7, 512)), (torch.float16, (33, 256)), (torch.bfloat16, (1, 256)))
    ):
        check(KQuantTriton("cpu"), Scheme(KQuant(kind)), shape, "k_quant", dtype, seed, (0, 1, 2, 5, 70))
    if kind == "IQ4_NL":
        check(KQuantTriton("cpu"), Scheme(KQuant(kind)), (5, 96), "k_quant", rows=(1, 3))


@pytest.mark.parametrize(
    "form", [RowCodebook(3, 16), RowCodebook(4), *map(KQuant, KINDS)], ids=lambda form: form.describe()
)
def test_products_are_exact_but_for_the_order_of_sums(form):
    """Not only close to the reference, which rounds the weight: blocks of few rows do not, except under products of scales."""
    kernel, prepared, layer = made(form, (5, 512), seed=3)
    w = kernel.weight(prepared, layer)
    exact = references.dequantize(w, torch.float64)
    assert torch.equal(exact.bfloat16(), kernel.restore(prepared, layer).dequantize())
    for count, dtype, config in ((1, torch.bfloat16, None), (2, torch.float16, SMALL)):
        x, bias = rows(count, 512, dtype, strided=True), rows(1, 5, dtype, 1)[0]
        with references.forced(config):
            assert_close(matvec(x, w, bias), x.double() @ exact.t() + bias.double(), dtype)
    for count, dtype, block, split in (
        (3, torch.bfloat16, 16, 2),
        (33, torch.float16, 32, 1),
        (70, torch.bfloat16, 64, 1),
    ):
        x = rows(count, 512, dtype)
        rounded = w.scale.dtype == torch.int16 or (block > 32 and w.group)
        expected = x.double() @ references.dequantize(w, dtype if rounded else torch.float64).double().t()
        with references.forced({"BLOCK_M": block, "BLOCK_N": 16, "SPLIT_K": split, "STAGES": 2, "num_warps": 4}):
            assert_close(matmul(x, w), expected, dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(dequantize(w, dtype), exact.to(dtype))


def test_every_entry_of_a_table_is_found():
    """Bytes of all values in every place, by every number in every field."""
    kernel, prepared, layer = made(RowCodebook(4), (16, 128))
    w = kernel.weight(prepared, layer)
    entries = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(16, 16)
    numbers = (torch.arange(128) // 16 + torch.arange(128) % 16)[None, :] + torch.arange(16)[:, None]
    codes = (numbers % 16 - 8).to(torch.int8)
    w = dataclasses.replace(
        w, words=layout.pack(codes, 4), table=layout.table_words(entries), scale=torch.ones(1, 16).bfloat16()
    )
    expected = entries.gather(1, (numbers % 16)).double()
    assert torch.equal(layout.table_entries(w.table), entries)
    assert torch.equal(dequantize(w, torch.float32).double(), expected)
    for count, product in ((1, matvec), (3, matmul)):
        x = rows(count, 128)
        assert_close(product(x, w), x.double() @ expected.t(), torch.bfloat16)


def with_outliers(form, levels, places, shape, dtype, scale=0.01):
    """The kernel, what it prepared of rows with these outliers, float64 `[N, K]`, and its layer."""
    generator, layer = torch.Generator().manual_seed(0), made(form, shape, dtype)[2]
    groups = shape[1] // form.group_size if form.group_size else 1
    outliers = (torch.randn(shape[0], len(places), generator=generator) * 100).to(dtype)
    parameters = {
        "levels": torch.tensor(levels, dtype=torch.int8).expand(shape[0], -1).contiguous(),
        "scale": torch.rand(shape[0], groups, generator=generator).add(0.5).mul(scale).to(dtype),
        "outlier_columns": stored_columns(torch.tensor(places)).expand(shape[0], -1).contiguous(),
    }
    codes = form.with_outliers(torch.randint(0, 2**form.bits, shape, generator=generator), parameters, outliers)
    weight = CompressedWeight.of(codes, parameters, None, layer.entry.scheme, dtype)
    kernel = RowCodebookTriton("cpu")
    prepared = kernel.prepare(layer.storage.pack(weight), layer)
    assert torch.equal(kernel.restore(prepared, layer).dequantize(), weight.dequantize())
    exact = form.dequantize(codes, parameters, torch.float64)
    assert torch.equal(exact[:, places], outliers.double())
    return kernel, prepared, exact, layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 4])
def test_outliers_under_large_inputs(bits, dtype):
    """Inputs so large that a level in the outliers' place would cover up everything else, or be infinite in float16."""
    levels = [-127, -90, 35, 127] if bits == 2 else [-128, *range(-97, 99, 14), 127]
    kernel, prepared, exact, layer = with_outliers(RowCodebook(bits, None, 0.05), levels, [0, 39], (5, 40), dtype, 1.0)
    prepared["weight_outliers"][:, 1], exact[:, 39] = 1, 1
    for count in (1, 9, 70):
        x = rows(count, 40, dtype, strided=True)
        x[:, 39] = 500
        bias = rows(1, 5, dtype, 1)[0]
        y = kernel.run(x, prepared, layer, bias)
        expected = x.double() @ exact.t() + bias.double()
        first = x[:, 1:39].double() @ exact[:, 1:39].t() + bias.double()
        held = 0 if bits == 2 else 500 * 1.5  # the level 1 times the largest scale
        rounding = torch.finfo(dtype).eps / 2
        assert bool(((y.double() - expected).abs() <= 1.1 * rounding * (expected.abs() + first.abs() + held)).all())
    x[4, 39] = float("inf")
    y = kernel.run(x, prepared, layer, None)
    assert not bool(y[4].isfinite().any())
    assert bool(y[:4].isfinite().all())


def test_outliers_beyond_column_32768():
    """Columns are stored as unsigned numbers of 16 bits; groups have scales of their own."""
    places, groups = torch.tensor([[0, 31, 32767, 32768, 32799], [15, 16, 17, 40000, 65535]]), 4096
    scale, values = torch.rand(groups, 2).bfloat16(), torch.randn(2, 5).bfloat16()
    held, x, y = torch.tensor([-7, 5], dtype=torch.int8), rows(9, 65536, strided=True), rows(9, 2, seed=1)
    words, table = torch.empty(0, 2, 16, dtype=torch.int32), torch.empty(4, 2, dtype=torch.int32)
    w = layout.Weight(words, scale, None, (2, 65536), 16, 4, codes="table", table=table)
    more = values.double() - held[:, None] * scale.double().t().gather(1, places // 16)
    expected = y.double() + (x.double()[:, places] * more).sum(-1)
    assert_close(add_outliers(y, x, w, held, stored_columns(places), values), expected, torch.bfloat16)


def test_presets_are_computed_and_activations_are_not_rounded():
    scheme = preset("W4A16_CODEBOOK")
    layer = Layer(ModuleEntry(scheme, "row_codebook"), (64, 64), torch.bfloat16, torch.device("cpu"))
    assert RowCodebookTriton("cpu").why_not(layer) is None
    rounded = dataclasses.replace(
        layer, entry=ModuleEntry(Scheme(scheme.weights, preset("W8A8").activations), "row_codebook")
    )
    assert "unquantized activations" in RowCodebookTriton("cpu").why_not(rounded)
