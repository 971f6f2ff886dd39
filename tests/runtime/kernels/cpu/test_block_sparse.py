"""Panels without groups of zeros: the results of panels that have them, on every instruction set, and the same stored weight."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace

import products
import pytest
import torch
from weight_cases import int_scheme, random_mask, random_weight

from runtime import formats
from runtime.kernels.cpu import library
from runtime.kernels.cpu.panels import PANEL
from runtime.kernels.cpu.zero_groups import kept_of, runs_of, stored_groups
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


def pair(
    scheme, shape: tuple[int, int], density: float, dtype: torch.dtype = torch.float32
) -> tuple[products.Case, products.Case]:
    """A weight without its blocks of zeros, and with them."""
    mask = random_mask(scheme.sparsity, shape, 3, density)
    weight = random_weight(scheme, shape, dtype, 3, mask)
    kind = "w4" if scheme.grid.bits <= 4 else "w8"
    sparse = products.of(kind, weight, "bitmap")
    dense = products.of(kind, replace(weight, mask=None, scheme=replace(scheme, sparsity=None)), "packed")
    assert "runs" in sparse.prepared
    assert "runs" not in dense.prepared
    assert sparse.prepared["weight"].numel() < dense.prepared["weight"].numel()
    return sparse, dense


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    return {name: library.load(name) for name in instruction_sets.available()} | {
        "emulated amx": products.emulated("avx512", "amx")
    }


SCHEMES = [
    (int_scheme(4, True, 128, "block:32x128"), (160, 1152)), (int_scheme(4, False, 64, "block:64x64"), (130, 516)),
    (int_scheme(3, False, 48, "block:32x48"), (69, 480)), (int_scheme(2, True, 16, "block:32x32"), (64, 160)),
    (int_scheme(8, False, "channel", "block:32x128"), (96, 1000)), (int_scheme(5, True, 512, "block:32x512"), (100, 2048)),
    (int_scheme(6, False, "tensor", "block:96x256"), (200, 1025)), (int_scheme(7, True, 32, "block:32x32"), (33, 320)),
]  # fmt: skip


@pytest.mark.parametrize("density", [0.5, 0.05])
@pytest.mark.parametrize(("scheme", "shape"), SCHEMES, ids=str)
def test_products(scheme, shape, density, libraries):
    sparse, dense = pair(scheme, shape, density)
    x, bias = torch.randn(133, shape[1], generator=torch.Generator().manual_seed(4)), torch.randn(shape[0])
    for digits in (1, 2, 3):
        expected = products.run(library.load(), dense, x, digits, bias=bias)
        for name, lib in libraries.items():
            counts = (1, 2, 7, 17) if name == "emulated amx" else (1, 2, 3, 5, 9, 17, 133)
            for rows in counts:
                found = products.run(lib, sparse, x[:rows], digits, 1 + rows % 3, bias)
                assert torch.equal(found, expected[:rows]), (name, digits, rows)
    exact = x.double() @ products.exact_weight(sparse.weight).t() + bias.double()
    assert ((expected.double() - exact).abs() <= products.error_bound(sparse, x, 3, exact)).all()


@pytest.mark.parametrize(("scheme", "shape"), SCHEMES, ids=str)
def test_the_weight_comes_back(scheme, shape, libraries):
    sparse, dense = pair(scheme, shape, 0.4)
    weight = sparse.layout.unpack(sparse.prepared, sparse.layer)
    again = formats.get("bitmap").pack(weight)
    assert again.keys() == sparse.stored.keys()
    for name, tensor in sparse.stored.items():
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name
    panels, linear = -(-shape[0] // PANEL), sparse.layout.linear(sparse.prepared, sparse.layer, None)
    assert stored_groups(linear) == sparse.prepared["weight"].shape[0]
    for lib in libraries.values():
        tile = torch.full((shape[1], shape[0] - PANEL), float("nan"))
        lib.linear_dequantize(ctypes.byref(linear), 1, panels, tile.data_ptr(), library.TYPES[torch.float32], 2)
        assert torch.equal(tile.t(), products.exact_weight(dense.weight)[PANEL:].float())


def test_rows_that_are_not_finite_are_nan_whatever_they_meet(libraries):
    """Also where every weight they meet is left out."""
    scheme, shape = int_scheme(4, True, 32, "block:32x32"), (64, 96)
    weight = random_weight(scheme, shape, torch.float32, 0, torch.zeros(shape, dtype=torch.bool))
    weight.values[:32, :32] = 1
    made = products.of("w4", replace(weight, mask=weight.values != 0), "bitmap")
    assert made.prepared["weight"].shape[0] == 1
    x = torch.randn(20, 96)
    x[3, 40], x[7, 0], x[9, 95] = float("inf"), float("nan"), float("-inf")
    for digits in (1, 2, 3):
        for name, lib in libraries.items():
            y = products.run(lib, made, x, digits)
            assert y[[3, 7, 9]].isnan().all(), name
            assert y[[i for i in range(20) if i not in (3, 7, 9)]].isfinite().all(), name
            assert products.run(lib, made, x[3:4], digits).isnan().all(), name
            assert (products.run(lib, made, x[:1], digits)[:, 32:] == 0).all(), name


def test_all_zeros_and_scales_that_are_not_finite():
    scheme, shape = int_scheme(4, False, 32, "block:32x32"), (64, 96)
    weight = random_weight(scheme, shape, torch.float32, 0, torch.zeros(shape, dtype=torch.bool))
    made = products.of("w4", weight, "bitmap")
    assert made.prepared["weight"].shape[0] == 1  # one stays
    assert (products.run(library.load(), made, torch.randn(3, 96), 2) == 0).all()
    weight.scale[40, 1] = float("inf")
    made = products.of("w4", weight, "bitmap")
    y = products.run(library.load(), made, torch.randn(3, 96), 2)
    assert y[:, 40].isnan().all()
    assert (y[:, [i for i in range(64) if i != 40]] == 0).all()


@pytest.mark.parametrize("zeros", [0.0, 0.04])
def test_few_groups_of_zeros_stay(zeros):
    weight = random_weight(
        int_scheme(4, True, 32, "block:32x32"), (320, 320), mask=torch.ones(320, 320, dtype=torch.bool)
    )
    count = round(zeros * 100)
    for block in range(count):
        weight.values[32 * (block % 10) :][:32, 32 * (block // 10) :][:, :32] = 0
    made = products.of("w4", weight, "bitmap")
    assert "runs" not in made.prepared


def test_runs():
    for density in (0.0, 0.1, 0.5, 0.9, 1.0):
        kept = torch.rand(7, 13, generator=torch.Generator().manual_seed(1)) < density
        made = runs_of(kept)
        assert torch.equal(kept_of(made, 13), kept)
        at = 0
        for panel in range(7):
            for first, last, before in made["runs"][made["first_run"][panel] : made["first_run"][panel + 1]].tolist():
                assert before == at
                assert kept[panel, first:last].all()
                at += last - first
        assert at == int(kept.sum())


def test_a_layer():
    """What explains says so, and copies and what is stored are as of any layer."""
    scheme, shape = int_scheme(4, True, 128, "block:32x128"), (256, 1024)
    layer, weight = products.linear(scheme, shape, torch.float32)
    stored = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    expected = layer(x := torch.randn(5, 1024))
    layer.prepare()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert layer.kernel_name == "int4-c, groups of zeros left out"
    assert layer.explain().endswith("groups of zeros left out")
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in stored.items())
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(layer.dequantize(), weight.dequantize())
