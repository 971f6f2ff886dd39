"""float8 weights in C against float64: every code, ragged shapes, and what is not a number."""

from __future__ import annotations

import pytest
import torch
from products import linear
from weight_cases import random_weight

from runtime.formats.scheme import GridScheme, Scheme
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_products(strategy, dtype):
    for seed, shape in enumerate(((37, 215), (1, 1), (33, 640), (5, 31))):
        scheme = Scheme(GridScheme(8, "float", True, strategy))
        layer, weight = linear(scheme, shape, dtype, weight=random_weight(scheme, shape, dtype, seed))
        layer.prepare("float8-c")
        assert layer.kernel_name == "float8-c"
        exact_weight = weight.values.double() * weight.scale.double().view(-1, 1)
        assert layer.explain(1).startswith("float32 products")
        for rows in (0, 1, 3, 17):
            x = torch.randn(rows, shape[1]).to(dtype)
            exact = x.double() @ exact_weight.t() + layer.bias.double()
            size = x.double().abs() @ exact_weight.abs().t() + layer.bias.double().abs()
            unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
            y = layer(x)
            assert (
                (y.double() - exact).abs() <= (shape[1] / 16 + 24) * 2.0**-24 * size + unit * exact.abs() + 2.0**-24
            ).all()
            assert all(torch.equal(layer(x[i : i + 1]), y[i : i + 1]) for i in range(rows))
        assert torch.equal(layer.dequantize(), weight.dequantize())


def test_every_code_has_its_value():
    scheme = Scheme(GridScheme(8, "float", True, "channel"))
    weight = random_weight(scheme, (256, 32), torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    weight.values.view(torch.uint8).zero_()
    weight.values.view(torch.uint8)[:, 3] = codes
    weight.scale.fill_(1.0)
    layer, _ = linear(scheme, (256, 32), torch.float32, weight=weight)
    layer.bias.data.zero_()
    layer.prepare("float8-c")
    x = torch.zeros(1, 32)
    x[0, 3] = 1.0
    expected = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=0, equal_nan=True)
