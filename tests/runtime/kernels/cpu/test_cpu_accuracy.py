"""The C kernels against float64, within bounds that follow from what they round; any shape, any scale, any activation."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import products
import pytest
import torch
from products import case, error_bound, exact_weight, run
from weight_cases import int_scheme, random_weight

from runtime.formats.scheme import Scheme
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
SIZES = (1, 7, 16, 17, 31, 257)
GROUPS = (16, 32, 48, 64, 128, 160, 256, 320, 512, "channel", "tensor")
DIGITS = ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 3), (torch.float32, 1))


def check(made: products.Case, x: torch.Tensor, digits: int, bias: torch.Tensor | None = None) -> None:
    y = run(library.load(), made, x, digits, bias=bias)
    exact = x.double() @ exact_weight(made.weight).t() + (0 if bias is None else bias.double())
    bound = error_bound(made, x, digits, exact)
    excess = (y.double() - exact).abs() - bound
    assert y.isfinite().all()
    assert (excess <= 0).all(), (made.layer, digits, float(excess.max()))


def schemes(kind: str, columns: int) -> list[Scheme]:
    """All that a layout holds with so many columns."""
    found = []
    bits = {"w4": (2, 3, 4), "w8": (5, 6, 7, 8), "s24": (2, 3, 4)}[kind]
    for width, symmetric, group in itertools.product(bits, (True, False), GROUPS):
        if isinstance(group, int) and (group > columns or (kind == "s24" and group % 32)):
            continue
        if kind == "s24" and not symmetric:
            continue
        found.append(int_scheme(width, symmetric, group, "2:4" if kind == "s24" else None))
    return found


@pytest.mark.parametrize("kind", ["w4", "w8", "s24"])
def test_shapes_and_grids(kind):
    chosen = random.Random(3)
    shapes = [*itertools.product(SIZES, SIZES), (33, 640), (16, 1031), (5, 1056)]
    for seed, (rows, columns) in enumerate(shapes):
        columns = -(-columns // 4) * 4 if kind == "s24" else columns
        options = schemes(kind, columns)
        for scheme in chosen.sample(options, min(4, len(options))):
            dtype, digits = chosen.choice(DIGITS)
            storage = "sparse24" if kind == "s24" else "packed"
            made = case(kind, scheme, (rows, columns), dtype, seed, storage)
            x = torch.randn(chosen.choice((1, 2, 5, 9)), columns).to(dtype)
            check(made, x, digits, torch.randn(rows) if seed % 2 else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["w4", "w8", "s24"])
def test_one_to_seventy_rows(kind, dtype):
    made = case(
        kind, int_scheme(8 if kind == "w8" else 4, True, 64, "2:4" if kind == "s24" else None), (35, 320), dtype
    )
    x = torch.randn(70, 320).to(dtype)
    for rows in range(71):
        check(made, x[:rows], 3 if dtype == torch.float32 else 2)
        check(made, x[:rows], 1)


@pytest.mark.parametrize(
    ("kind", "sparsity"),
    [
        ("w4", None),
        ("w4", "unstructured"),
        ("w4", "2:4"),
        ("w8", None),
        ("w8", "2:4"),
        ("w8", "unstructured"),
        ("s24", "2:4"),
    ],
)
def test_hostile_scales_and_activations(kind, sparsity):
    columns = 192
    scheme = int_scheme(8 if kind == "w8" else 4, kind == "s24", 64, sparsity)
    for dtype, digits in DIGITS:
        weight = random_weight(scheme, (21, columns), dtype)
        weight.scale[1], weight.scale[2] = 0, -weight.scale[2]
        weight.scale[3] = torch.finfo(dtype).smallest_normal / 16  # subnormal
        weight.scale[4] = 2.0 if dtype == torch.float16 else 200.0
        made = products.of(kind, weight)
        x = torch.randn(8, columns)
        x[1] = 0
        x[2, :64] = 0
        x[3, ::7] = 1e4
        x[4] *= torch.finfo(dtype).smallest_normal
        x[5] *= torch.finfo(dtype).smallest_normal / 100
        x[6] = torch.where(x[6] > 0, 1.0, -1.0)
        x[7] *= 1e-3
        x = x.to(dtype)
        if dtype == torch.float16:
            x = x.clamp(-3, 3)  # 1e4 times the weights would leave its range, rightly
        check(made, x, digits)


def test_activations_that_are_not_finite_spoil_their_row_alone():
    made = case("w4", int_scheme(4, False, 32), (19, 96), torch.bfloat16)
    x = torch.randn(5, 96).to(torch.bfloat16)
    clean = run(library.load(), made, x, 2)
    x[1, 3], x[3, 95] = float("nan"), float("-inf")
    y = run(library.load(), made, x, 2)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


def test_largest_floats():
    made = case("w4", int_scheme(4, True, 32), (16, 64), torch.float32)
    made = products.of("w4", replace(made.weight, scale=made.weight.scale * 1e-3))
    x = torch.randn(4, 64).clamp(-1, 1) * torch.finfo(torch.float32).max / 4
    for digits in (1, 2, 3):
        check(made, x, digits)


def test_two_digits_hold_bfloat16_of_one_size_exactly():
    """Numbers within 2^-6 of the largest of their group lose nothing, so the result is the exact sum, rounded once."""
    made = case("w4", int_scheme(4, True, 32), (48, 32), torch.bfloat16)
    x = (torch.rand(6, 32) * 0.9 + 0.1).to(torch.bfloat16)
    exact = (x.double() @ exact_weight(made.weight).t()).to(torch.bfloat16)
    same = (run(library.load(), made, x, 2) == exact).float().mean()
    assert same > 0.99  # the sum of the digits' parts is rounded to float32 first
