"""Ternary weights in C: the bits of the dense product on every instruction set, whatever the weights, the shape and the threads."""

from __future__ import annotations

import ctypes
from typing import Any

import products
import pytest
import torch

from runtime import formats
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary, ternary_scale_dtype
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
FORM = TernaryDictionary()
# A section of sums is 2048 columns: words reach over its end. Widths of a few words, and of none that is whole.
SHAPES = [(1, 1), (9, 2), (5, 31), (37, 215), (33, 256), (34, 2085), (3, 4384), (66, 2048)]


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL | None]:
    found = {name: library.load(name) for name in instruction_sets.available()}
    assert "portable" in found
    return found | {"emulated": products.emulated("avx512")}


def layer_of(shape: tuple[int, int], zeros: float, dtype: torch.dtype) -> tuple[CompressedLinear, torch.Tensor]:
    """A layer, and its weight in 16-bit floats."""
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    codes = (signs * (torch.rand(shape, generator=generator) >= zeros)).to(torch.int8)
    parameters = {"scale": torch.rand(shape[0], 1, generator=generator).to(ternary_scale_dtype(dtype))}
    made = CompressedWeight.of(codes, parameters, None, Scheme(FORM), dtype)
    layer, _ = products.linear(made.scheme, shape, dtype, weight=made)
    layer.prepare("ternary-c")
    return layer, FORM.dequantize(codes, parameters, ternary_scale_dtype(dtype)).contiguous()


@pytest.mark.sampled(15, 6)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_dense_weight(
    shape: tuple[int, int], zeros: float, libraries: dict[str, Any]
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer, weight = layer_of(shape, zeros, dtype)
        assert layer.bias is not None
        bias = layer.bias.detach().float()
        ours, theirs = layer.choice.decode.linear(layer._tensors(), layer.layer, bias), products.dense(weight, bias)
        for rows in (1, 2, 5, 13, 29, 64) if shape[1] < 2000 else (1, 29, 64):
            x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
            exact = x.double() @ weight.double().T + bias.double()
            size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
            for isa, lib in libraries.items():
                found = products.multiply(lib, ours, x, 1 + rows % 3)
                assert torch.equal(found, products.multiply(lib, theirs, x)), (rows, isa)
            off = (shape[1] / 16 + 22) * 2.0**-24 * size + products.UNIT[dtype] * exact.abs() + products.TINY[dtype]
            assert ((found.double() - exact).abs() <= 1.01 * off).all()
            assert torch.equal(layer(x), products.multiply(library.load(), theirs, x))


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(libraries: dict[str, Any]) -> None:
    layer, _ = layer_of((83, 640), 0.88, torch.bfloat16)
    x = torch.randn(64, 640).bfloat16()
    ours = layer.choice.decode.linear(layer._tensors(), layer.layer, None)
    alone = torch.cat([products.multiply(libraries["portable"], ours, row[None]) for row in x])
    for name, lib in libraries.items():
        for rows in (1, 2, 7, 24, 25, 64):
            for threads in (1, 2, 5, 16):
                assert torch.equal(products.multiply(lib, ours, x[:rows], threads), alone[:rows]), (name, rows, threads)


def test_the_stored_tensors_stay_and_wide_layers_are_refused() -> None:
    layer, weight = layer_of((64, 384), 0.9, torch.bfloat16)
    assert torch.equal(layer.dequantize(), weight)
    wanted = formats.get("ternary_dictionary").tensors(Scheme(FORM), (64, 384), torch.bfloat16)
    assert set(layer.state_dict()) - {"bias"} == set(wanted)
    kernel, wide = layer.choice.decode, layer.layer
    assert kernel.why_not(wide) is None
    object.__setattr__(wide, "shape", (64, 2**15 + 1))
    assert "32768" in str(kernel.why_not(wide))
