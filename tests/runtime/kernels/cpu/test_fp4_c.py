"""4-bit block floats in C against float64: all codes, extreme scales, ragged shapes, and the stored bytes back."""

from __future__ import annotations

import itertools
from dataclasses import replace

import products
import pytest
import torch

from runtime import formats
from runtime.formats.block_float import BlockFloat
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.cpu import library, planes
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
NAMES = list(products.FLOATS)
HALVES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
DIGITS = ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 3))


def weight_of(
    name: str, shape: tuple[int, int], dtype: torch.dtype, scales: torch.Tensor, common: float = 1.0
) -> CompressedWeight:
    """All codes, and scales drawn from such bytes."""
    scheme = products.FLOATS[name]
    grid = scheme.weights
    assert isinstance(grid, BlockFloat)
    codes = HALVES[torch.randint(len(HALVES), shape)]
    scale = scales[torch.randint(len(scales), grid.parameter_shape(shape))].to(torch.uint8)
    if name == "mxfp4":
        return CompressedWeight.of(codes, {"scale": scale}, None, scheme, dtype)
    parameters = {"scale": scale.view(torch.float8_e4m3fn), "global_scale": torch.tensor([common])}
    return CompressedWeight.of(codes, parameters, None, scheme, dtype)


def check(made: products.Case, x: torch.Tensor, digits: int, bias: torch.Tensor | None = None) -> None:
    exact = x.double() @ products.exact_weight(made.weight).t() + (0 if bias is None else bias.double())
    bound = products.error_bound(made, x, digits, exact)
    alone = None
    for name in instruction_sets.available():
        y = products.run(library.load(name), made, x, digits, bias=bias)
        assert y.isfinite().all()
        assert ((y.double() - exact).abs() <= bound).all(), (name, made.layer, digits)
        alone = y if alone is None else alone
        assert torch.equal(y, alone), name


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_rows(name):
    shapes = itertools.product((1, 31, 33, 70), (32, 96, 544))
    for (rows, columns), (dtype, digits) in itertools.product(shapes, DIGITS):
        made = products.of(
            "e2m1",
            weight_of(name, (rows, columns), dtype, torch.arange(112, 125) if name == "mxfp4" else torch.arange(1, 90)),
        )
        bias = torch.randn(rows) if columns == 96 else None
        for count in (1, 2, 5, 17, 70):
            check(made, torch.randn(count, columns).to(dtype), digits, bias)


def test_a_row_of_one_group_of_sixteen():
    for rows, (dtype, digits) in itertools.product((1, 40), DIGITS):
        made = products.of("e2m1", weight_of("nvfp4", (rows, 16), dtype, torch.arange(1, 90)))
        for count in (1, 3, 20):
            check(made, torch.randn(count, 16).to(dtype), digits)


@pytest.mark.parametrize(("name", "scales", "common", "size"), [
    ("mxfp4", [0, 1, 2, 3], 1.0, 1e30), ("mxfp4", [2], 1.0, 1.0), ("mxfp4", [252, 253, 254], 1.0, 1e-20), ("mxfp4", [237], 1.0, 1e3),
    ("mxfp4", [0, 127, 200], 1.0, 1.0), ("nvfp4", range(1, 16), 1.0, 1.0), ("nvfp4", [*range(127), *range(128, 255)], 1.0, 1.0),
    ("nvfp4", [1, 8, 126], 3e38, 1e35), ("nvfp4", [1, 2], 2.0**-126, 1e-5), ("nvfp4", [1, 8, 126], 2.0**-110, 1e-5),
    ("nvfp4", range(100, 127), 1234.567, 1.0),
])  # fmt: skip
def test_extreme_scales(name, scales, common, size):
    """Subnormal ones, the largest, negative ones, all in one row too; global ones that are the smallest and largest normal numbers."""
    weight = weight_of(name, (37, 96), torch.float32, torch.tensor([*scales]), common)
    made = products.of("e2m1", weight)
    x = torch.randn(7, 96) * size
    for digits in (1, 2, 3):
        check(made, x, digits)


@pytest.mark.parametrize("name", NAMES)
def test_largest_sums(name):
    """Codes and digits that are all as large as can be: sums of 16 bits, where there are such, hold them."""
    weight = weight_of(name, (32, 64), torch.float32, torch.tensor([120]))
    for code in (12, -12):
        made = products.of("e2m1", replace(weight, values=torch.full_like(weight.values, code)))
        sign = torch.tensor([1.0, -1.0]).repeat(9)[:, None]
        for x in (sign.expand(18, 64), sign * (torch.rand(18, 64) * 0.02 + 0.98)):
            for digits, rows in itertools.product((1, 2, 3), (1, 2, 18)):
                check(made, x[:rows], digits)


def test_a_scale_that_is_no_number_spoils_its_rows():
    for name, byte in (("mxfp4", 255), ("nvfp4", 127), ("nvfp4", 255)):
        weight = weight_of(name, (40, 64), torch.float32, torch.tensor([56]))
        weight.parameters["scale"].view(torch.uint8)[3, 1] = byte
        made = products.of("e2m1", weight)
        x = torch.randn(5, 64)
        wanted = x @ weight.dequantize().t()
        found = products.run(library.load(), made, x, 3)
        fine = torch.arange(40) != 3
        assert torch.allclose(found[:, fine], wanted[:, fine], rtol=1e-4, atol=1e-4)
        assert not found[:, 3].isfinite().any()
        assert not wanted[:, 3].isfinite().any()
        again = formats.get(made.layer.entry.format).pack(made.layout.unpack(made.prepared, made.layer))
        assert all(torch.equal(again[key].view(torch.uint8), made.stored[key].view(torch.uint8)) for key in again)


@pytest.mark.parametrize("name", NAMES)
def test_stored_tensors_come_back_bit_for_bit(name):
    for number, shape in enumerate(((1, 32), (16, 64), (33, 96), (70, 544))):
        weight = weight_of(name, shape, torch.bfloat16, torch.arange(127), 1.0 + number)
        form = formats.choose(weight.scheme, shape)
        stored = form.pack(weight)
        layer = CompressedLinear.from_tensors(
            products.of("e2m1", weight).layer.entry, shape, stored, None, torch.bfloat16
        )
        before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
        layer.prepare("fp4-c")
        assert layer.kernel_name == "fp4-c"
        after = layer.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key].view(torch.uint8), before[key].view(torch.uint8)) for key in before)
        assert torch.equal(layer.dequantize(), weight.dequantize())


def test_minus_zero_is_zero():
    weight = weight_of("mxfp4", (32, 32), torch.float32, torch.tensor([127]))
    made = products.of("e2m1", weight)
    made.stored["weight_packed"][:] = 0x88
    prepared = made.layout.pack(made.stored, made.layer)
    x = torch.randn(3, 32)
    for name in instruction_sets.available():
        assert not products.run(library.load(name), replace(made, prepared=prepared), x, 3).any()
    assert not made.layout.unpack(prepared, made.layer).values.any()


@pytest.mark.parametrize("name", NAMES)
def test_stored_bytes_that_begin_anywhere(name, monkeypatch):
    """Files promise no alignment; in C and in torch."""
    weight = weight_of(name, (37, 96), torch.bfloat16, torch.arange(1, 90))
    made = products.of("e2m1", weight)
    for start in range(4):
        packed = made.stored["weight_packed"]
        held = torch.empty(packed.numel() + 8, dtype=torch.uint8)[start : start + packed.numel()].view(packed.shape)
        held.copy_(packed)
        assert torch.equal(planes.words_of(held).view(torch.uint8), packed)
        again = made.layout.pack(made.stored | {"weight_packed": held}, made.layer)
        assert torch.equal(again["weight"], made.prepared["weight"])
        monkeypatch.setattr(library, "pack_stream", lambda *_: None)
        slow = made.layout.pack(made.stored | {"weight_packed": held}, made.layer)
        monkeypatch.undo()
        assert torch.equal(slow["weight"], made.prepared["weight"])


@pytest.mark.parametrize("name", NAMES)
def test_memory_a_weight_and_many_rows(name):
    weight = weight_of(name, (256, 1024), torch.bfloat16, torch.arange(40, 60))
    stored = formats.choose(weight.scheme, (256, 1024)).pack(weight)
    entry = products.of("e2m1", weight).layer.entry
    layer = CompressedLinear.from_tensors(entry, (256, 1024), stored, torch.randn(256).bfloat16(), torch.bfloat16)
    x = torch.randn(80, 1024).bfloat16() if name == "nvfp4" else torch.randn(80, 1024).bfloat16() * 2.0**70
    expected = layer(x).float()
    for kernel, error in (("fp4-c", 5e-3), ("dense-tiles", 5e-3), ("fp4-c-fast", 2e-2)):
        layer.prepare(kernel)
        assert float((layer(x).float() - expected).norm()) <= error * float(expected.norm())
    bits = 8 * sum(b.numel() * b.element_size() for b in layer.buffers()) / weight.values.numel()
    assert bits <= (4.26 if name == "mxfp4" else 4.51)
