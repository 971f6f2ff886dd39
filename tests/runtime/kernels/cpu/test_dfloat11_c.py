"""DFloat11 in C: the bits of the dense bfloat16 product on every instruction set, whatever the weights, the shape and the threads."""

from __future__ import annotations

import ctypes
from typing import Any

import products
import pytest
import torch

from runtime import formats
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL | None]:
    found = {name: library.load(name) for name in instruction_sets.available()}
    assert "portable" in found
    return found | {"emulated": products.emulated("avx512")}


def layer_of(weight: torch.Tensor, width: int, dtype: torch.dtype) -> CompressedLinear:
    form = DFloat11(width)
    parameters = form.fit(weight, torch.bfloat16)
    made = CompressedWeight.of(form.round(weight, parameters), parameters, None, Scheme(form), dtype)
    layer, _ = products.linear(made.scheme, tuple(weight.shape), dtype, weight=made)
    layer.prepare("dfloat11-c")
    return layer


def kinds_of_weights(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    finite = EVERY[EVERY.isfinite() & (EVERY.abs() < 1e6)]
    return {
        "normal": (torch.randn(shape, generator=generator) * 0.02).bfloat16(),
        "all kinds": finite[torch.randint(0, len(finite), shape, generator=generator)],  # most exponents are listed
        "one exponent": torch.rand(shape, generator=generator).add(1).bfloat16(),  # none is
    }


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (37, 215), (33, 256), (17, 264), (34, 2085), (3, 4384)], ids=str)
def test_products_are_those_of_the_dense_weight(shape: tuple[int, int], width: int, libraries: dict[str, Any]) -> None:
    for name, weight in kinds_of_weights(shape).items():
        for dtype in (torch.bfloat16, torch.float32):
            layer = layer_of(weight, width, dtype)
            bias = layer.bias.detach().float()
            ours, theirs = layer.choice.decode.linear(layer._tensors(), layer.layer, bias), products.dense(weight, bias)
            for rows in (1, 2, 5, 13, 29) if shape[1] < 2000 else (1, 29):
                x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
                for isa, lib in libraries.items():
                    threads = 1 + rows % 3
                    wanted = products.multiply(lib, theirs, x, threads)
                    assert torch.equal(products.multiply(lib, ours, x, threads), wanted), (name, rows, isa)
                assert torch.equal(layer(x), products.multiply(library.load(), theirs, x))


def test_every_number_comes_through(libraries: dict[str, Any]) -> None:
    """A product with one: the bits of each number that is one, and NaN where none is."""
    layer = layer_of(EVERY[:, None].contiguous(), 3, torch.float32)
    held = layer.choice.decode.linear(layer._tensors(), layer.layer, None)
    for lib in libraries.values():
        y = products.multiply(lib, held, torch.ones(1, 1))[0]
        assert torch.equal(y.isnan(), EVERY.isnan())
        number = ~EVERY.isnan()
        assert torch.equal(y[number], EVERY[number].float())


def test_the_stored_tensors_stay_and_wide_layers_are_refused() -> None:
    weight = kinds_of_weights((64, 384))["normal"]
    layer = layer_of(weight, 3, torch.bfloat16)
    assert torch.equal(layer.dequantize(), weight)
    assert set(layer.state_dict()) - {"bias"} == set(
        formats.get("dfloat11").tensors(Scheme(DFloat11()), (64, 384), torch.bfloat16)
    )
    kernel, wide = layer.choice.decode, layer.layer
    assert kernel.why_not(wide) is None
    object.__setattr__(wide, "shape", (64, 2**15 + 1))
    assert "32768" in str(kernel.why_not(wide))
