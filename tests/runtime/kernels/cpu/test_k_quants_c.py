"""K-quants in C against float64: any bytes, extreme scales of two levels, ragged shapes, and the stored bytes back."""

from __future__ import annotations

import itertools

import products
import pytest
import torch

from runtime import formats
from runtime.errors import RequestError
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.scheme import CompressedWeight, Scheme
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
DIGITS = ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 3))
BITS = {
    "Q2_K": 2.625,
    "Q3_K": 3.5625,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
}
"""Of a weight in memory."""


def weight_of(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, factors: torch.Tensor | None = None
) -> CompressedWeight:
    """All codes and integer scales that blocks can hold; fp16 factors of both signs, or drawn from `factors`."""
    form = KQuant(kind)
    stored = torch.randint(0, 256, form.tensors(shape, dtype)["weight_blocks"].shape, dtype=torch.uint8)
    codes, parameters = form.decode({"weight_blocks": stored}, shape)
    for name in parameters.keys() & {"d", "dmin"}:
        size = parameters[name].shape
        drawn = torch.randn(size) * 1e-3 if factors is None else factors[torch.randint(len(factors), size)]
        parameters[name] = drawn.to(torch.float16)
    return CompressedWeight.of(codes, parameters, None, Scheme(form), dtype)


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


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_rows(kind: str) -> None:
    shapes = itertools.product((1, 31, 33, 70), (32, 96, 544) if kind == "IQ4_NL" else (256, 768))
    for (rows, columns), (dtype, digits) in itertools.product(shapes, DIGITS):
        made = products.of("k", weight_of(kind, (rows, columns), dtype))
        bias = torch.randn(rows) if columns in (96, 768) else None
        for count in (1, 2, 3, 5, 17, 70):
            check(made, torch.randn(count, columns).to(dtype), digits, bias)


@pytest.mark.parametrize(("factors", "size"), [
    ([2.0**-24, -(2.0**-24)], 1.0), ([2.0**-24, 2.0**-20], 1e-30), ([65504.0, -65504.0], 1e20), ([65504.0, 2.0**-24], 1.0),
    ([0.0], 1.0), ([0.0, 0.01], 1.0), ([-1.0, -0.5], 1e-3),
])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_factors(kind: str, factors: list[float], size: float) -> None:
    """Subnormal ones, the largest, negative ones and zeros, in one row too."""
    made = products.of("k", weight_of(kind, (37, 512), torch.float32, torch.tensor(factors)))
    x = torch.randn(7, 512) * size
    for digits, rows in itertools.product((1, 2, 3), (1, 7)):
        check(made, x[:rows], digits)


@pytest.mark.parametrize("kind", KINDS)
def test_largest_sums(kind: str) -> None:
    """Codes, integer scales and digits that are all as large as can be: sums of 16 and of 32 bits hold them."""
    form, shape = KQuant(kind), (32, 512)
    made = weight_of(kind, shape, torch.float32, torch.tensor([1.0]))
    for code, level in itertools.product(form.code_range, {form.facts.low, form.facts.high}):
        codes = torch.full(shape, code, dtype=torch.int8)
        parameters = made.parameters | {"scale": torch.full_like(made.parameters["scale"], level)}
        if "minimum" in parameters:
            parameters["minimum"] = torch.full_like(parameters["minimum"], form.facts.high)
        case = products.of("k", CompressedWeight.of(codes, parameters, None, Scheme(form), torch.float32))
        sign = torch.tensor([1.0, -1.0]).repeat(9)[:, None]
        for x in (sign.expand(18, 512), sign * (torch.rand(18, 512) * 0.02 + 0.98)):
            for digits, rows in itertools.product((1, 2, 3), (1, 2, 18)):
                check(case, x[:rows], digits)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_spoils_its_rows(kind: str) -> None:
    weight = weight_of(kind, (40, 512), torch.float32)
    for number, name in enumerate(sorted(weight.parameters.keys() & {"d", "dmin"})):
        weight.parameters[name][3 + number, 0] = float("nan")
        weight.parameters[name][7 + number, 1] = float("inf")
    made = products.of("k", weight)
    bad = weight.dequantize().isfinite().logical_not().any(1)
    x = torch.randn(6, 512)
    x[2, 300], x[4, 0] = float("inf"), float("nan")
    wanted = x @ weight.dequantize().t()
    for lib, rows in itertools.product(map(library.load, instruction_sets.available()), (1, 6)):
        found = products.run(lib, made, x[:rows], 3)
        assert torch.allclose(found[::2][:1, ~bad], wanted[::2][:1, ~bad], rtol=1e-4, atol=1e-4)
        assert not found[:, bad].isfinite().any()
        assert found[2:5:2].isnan().all()
    assert torch.equal(made.layout.unpack(made.prepared, made.layer).dequantize().isnan(), weight.dequantize().isnan())


@pytest.mark.parametrize("kind", KINDS)
def test_stored_bytes_come_back(kind: str) -> None:
    """Any bytes, NaN among the factors too."""
    for shape in ((1, 256), (33, 512), (70, 768)):
        form = KQuant(kind)
        stored = torch.randint(0, 256, form.tensors(shape, torch.bfloat16)["weight_blocks"].shape, dtype=torch.uint8)
        tensors = {"weight_blocks": stored}
        entry = products.of("k", weight_of(kind, shape, torch.bfloat16)).layer.entry
        layer = CompressedLinear.from_tensors(entry, shape, {"weight_blocks": stored.clone()}, None, torch.bfloat16)
        layer.prepare("k-quant-c")
        assert layer.kernel_name == "k-quant-c"
        after = layer.state_dict()
        assert after.keys() == tensors.keys()
        assert torch.equal(after["weight_blocks"], stored)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_a_weight_and_many_rows(kind: str) -> None:
    weight = weight_of(kind, (256, 1024), torch.bfloat16)
    stored = formats.choose(weight.scheme, (256, 1024)).pack(weight)
    entry = products.of("k", weight).layer.entry
    layer = CompressedLinear.from_tensors(entry, (256, 1024), stored, torch.randn(256).bfloat16(), torch.bfloat16)
    x = torch.randn(80, 1024).bfloat16()
    expected = layer(x).float()
    for kernel, error in (("k-quant-c", 5e-3), ("dense-tiles", 5e-3), ("k-quant-c-fast", 2e-2)):
        layer.prepare(kernel)
        assert float((layer(x).float() - expected).norm()) <= error * float(expected.norm())
    bits = 8 * sum(b.numel() * b.element_size() for b in layer.buffers()) / weight.values.numel()
    assert bits <= BITS[kind] + 0.01


def test_other_dtypes_are_refused() -> None:
    layer, _ = products.linear(products.K_QUANTS["Q4_K"], (32, 256), torch.float64)
    with pytest.raises(RequestError, match="k-quant-c cannot compute this layer: it computes in float32"):
        layer.prepare("k-quant-c")
