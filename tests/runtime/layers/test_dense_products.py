"""Widened products: the same numbers as 16-bit arithmetic, and only where they are faster."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.layers import dense_products
from runtime.layers.dense_products import FEWEST_ROWS, WidenedProducts, products


class _Products(TorchDispatchMode):
    """Dtypes of the matrices that products really get while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default):
            self.dtypes += [value.dtype for value in args[-2:]]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen():
    with _Products() as watched:
        yield watched.dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_product_is_the_float32_product_rounded_once(dtype, seen) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 9, 40), (24, 40), (24,)))
    with WidenedProducts():
        y = functional.linear(x, w, b)
        assert seen == [torch.float32] * 2
        named = functional.linear(input=x, weight=w, bias=b)
        product = x @ w.T
        assert seen == [torch.float32] * 6
        added = torch.addmm(b, x.flatten(0, 1), w.T, alpha=0.5)
        assert seen == [torch.float32] * 8
        other = x + x
        assert len(seen) == 8, "sums are no products"
    assert {each.dtype for each in (y, named, product, added, other)} == {dtype}
    assert torch.equal(y, functional.linear(x.float(), w.float(), b.float()).to(dtype))
    assert torch.equal(y, named)
    assert torch.equal(product, (x.float() @ w.float().T).to(dtype))
    assert torch.equal(added, torch.addmm(b.float(), x.flatten(0, 1).float(), w.float().T, alpha=0.5).to(dtype))
    # One rounding is at most half of the last bit: bfloat16 has 8, float16 11.
    exact = functional.linear(x.double(), w.double(), b.double())
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_float32_and_results_with_a_place_of_their_own_pass_through(seen) -> None:
    x, w = torch.randn(FEWEST_ROWS, 8), torch.randn(6, 8)
    out = torch.zeros(FEWEST_ROWS, 6, dtype=torch.bfloat16)
    with WidenedProducts():
        assert functional.linear(x, w).dtype == torch.float32
        torch.mm(x.bfloat16(), w.bfloat16().T, out=out)
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert out.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mode_is_for_types_that_the_cpu_does_not_multiply(dtype, monkeypatch) -> None:
    monkeypatch.setattr(dense_products.processes, "multiplies", lambda asked: asked != dtype)
    assert isinstance(products(torch.device("cpu"), dtype), WidenedProducts)
    for device, other in (
        ("cuda", dtype),
        ("cpu", torch.float32),
        ("cpu", ({*dense_products.WIDENED} - {dtype}).pop()),
    ):
        assert not isinstance(products(torch.device(device), other), WidenedProducts)


def test_few_rows_and_large_matrices_are_multiplied_as_they_are(seen) -> None:
    w = torch.randn(6, 8).bfloat16()
    for rows, most, dtype in (
        (FEWEST_ROWS - 1, None, torch.bfloat16),
        (FEWEST_ROWS, None, torch.float32),
        (FEWEST_ROWS, 8 * FEWEST_ROWS, torch.float32),
        (FEWEST_ROWS, 47, torch.bfloat16),
    ):
        x = torch.randn(rows, 8).bfloat16()
        seen.clear()
        with WidenedProducts(most):
            functional.linear(x, w)
            torch.addmm(torch.zeros(6).bfloat16(), x, w.T)
        assert seen == [dtype] * 4
