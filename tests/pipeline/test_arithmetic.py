"""Widened products: the same numbers as bfloat16 arithmetic, and only where they are asked for."""

from __future__ import annotations

import torch
from torch.nn import functional

from compress.pipeline.arithmetic import WidenedProducts, products


def test_a_widened_product_is_the_float32_product_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((3, 5, 40), (24, 40), (24,)))
    with WidenedProducts():
        y = functional.linear(x, w, b)
        product = x @ w.T
        other = x + x
    assert y.dtype == product.dtype == other.dtype == torch.bfloat16
    assert torch.equal(y, functional.linear(x.float(), w.float(), b.float()).bfloat16())
    assert torch.equal(product, (x.float() @ w.float().T).bfloat16())
    # bfloat16 has 8 bits: one rounding is at most 2^-9 of the value.
    torch.testing.assert_close(y.double(), functional.linear(x.double(), w.double(), b.double()), rtol=2**-8, atol=1e-4)


def test_float32_passes_through() -> None:
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    with WidenedProducts():
        assert torch.equal(functional.linear(x, w), torch.nn.functional.linear(x, w))
        assert functional.linear(x, w).dtype == torch.float32


def test_a_gpu_needs_none() -> None:
    assert not isinstance(products(torch.device("cuda")), WidenedProducts)
