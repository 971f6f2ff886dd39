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
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.kernels.base import Layer
from runtime.kernels.triton import layout
from runtime.kernels.triton.codebooks import KQuantTriton, RowCodebookTriton
from runtime.kernels.triton.matmul import dequantize, matmul
from runtime.kernels.triton.matvec import matvec

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
    """The kernel, what it prepared of a random weight, and its layer."""
    scheme = Scheme(form)
    stored = formats.choose(scheme, shape)
    tensors = stored.pack(random_weight(scheme, shape, dtype, seed))
    layer = Layer(ModuleEntry(scheme, stored.name), shape, dtype, torch.device("cpu"))
    kernel = (RowCodebookTriton if isinstance(form, RowCodebook) else KQuantTriton)("cpu")
    return kernel, kernel.prepare(tensors, layer), layer


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


def test_outliers_replace_what_stands_in_their_places():
    """Unlike any level of the row, in the first and the last column, and for rows of which one is not finite."""
    form, generator = RowCodebook(2, None, 0.05), torch.Generator().manual_seed(0)
    kernel, _, layer = made(form, (5, 40))
    outliers = torch.tensor([[64.0, -128.0]]).bfloat16().expand(5, 2).contiguous()
    parameters = {
        "levels": torch.tensor([[-90, -3, 20, 127]], dtype=torch.int8).expand(5, 4).contiguous(),
        "scale": torch.full((5, 1), 0.01).bfloat16(),
        "outlier_columns": torch.tensor([[0, 39]], dtype=torch.int16).expand(5, 2).contiguous(),
    }
    codes = form.with_outliers(torch.randint(0, 4, (5, 40), generator=generator), parameters, outliers)
    weight = CompressedWeight.of(codes, parameters, None, layer.entry.scheme, layer.dtype)
    prepared = kernel.prepare(layer.storage.pack(weight), layer)
    dense = kernel.restore(prepared, layer).dequantize().double()
    assert torch.equal(dense[:, [0, 39]], outliers.double())
    x = rows(9, 40, strided=True)
    x[4, 39] = float("inf")
    y = kernel.run(x, prepared, layer, None)
    assert not bool(y[4].isfinite().any())
    there = [row for row in range(9) if row != 4]
    torch.testing.assert_close(y[there].double(), x[there].double() @ dense.t(), rtol=2**-7, atol=2e-2)


def test_presets_are_computed_and_activations_are_not_rounded():
    scheme = preset("W4A16_CODEBOOK")
    layer = Layer(ModuleEntry(scheme, "row_codebook"), (64, 64), torch.bfloat16, torch.device("cpu"))
    assert RowCodebookTriton("cpu").why_not(layer) is None
    rounded = dataclasses.replace(
        layer, entry=ModuleEntry(Scheme(scheme.weights, preset("W8A8").activations), "row_codebook")
    )
    assert "unquantized activations" in RowCodebookTriton("cpu").why_not(rounded)
