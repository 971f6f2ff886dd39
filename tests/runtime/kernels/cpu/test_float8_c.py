"""float8 weights in C against float64: every code, ragged shapes, and what is not a number."""

from __future__ import annotations

import products
import pytest
import torch
from products import linear
from weight_cases import random_weight

from runtime.formats.block_float import BlockFloat
from runtime.formats.float8_block import Float8Block
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme
from runtime.kernels.cpu import library
from runtime.system import instruction_sets

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def emulated() -> dict[str, object]:
    return {"emulated": products.emulated("avx512")}


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("grid", "shape"),
    [
        *((BlockFloat(8), shape) for shape in ((37, 224), (1, 32), (33, 640), (66, 4128))),
        *((Float8Block(), shape) for shape in ((37, 128), (1, 384), (300, 640), (130, 4224))),
        (Float8Block(8, 48, 128), (150, 256)),
    ],
    ids=str,
)
def test_blocks_with_scales(grid, shape, dtype, emulated):
    """All codes, and scales of many sizes in a row: as float64 to the rounding of the sums, and the same bits everywhere."""
    few = shape[1] < 4096
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    if isinstance(grid, BlockFloat):
        scale = torch.randint(119, 128, grid.parameter_shape(shape), dtype=torch.uint8)
        spread = 2.0 ** (scale.double() - 127).repeat_interleave(32, 1)
    else:
        scale = torch.rand(grid.tensors(shape, dtype)["weight_scale"].shape).to(dtype)
        spread = scale.double().repeat_interleave(grid.height, 0)[: shape[0]].repeat_interleave(grid.width, 1)
    weight = CompressedWeight.of(codes.view(torch.float8_e4m3fn), {"scale": scale}, None, Scheme(grid), dtype)
    layer, _ = linear(weight.scheme, shape, dtype, weight=weight)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.prepare()
    assert layer.kernel_name == "float8-c"
    exact_weight = weight.values.double() * spread
    held = layer.choice.decode.linear(layer._tensors(), layer.layer, layer.bias.float())
    for rows in (1, 2, 3, 5, 13, 17, 41) if few else (1, 29):
        x = torch.randn(rows, shape[1]).to(dtype)
        exact = x.double() @ exact_weight.t() + layer.bias.double()
        size = x.double().abs() @ exact_weight.abs().t() + layer.bias.double().abs()
        bound = (shape[1] / 16 + 24) * 2.0**-24 * size + products.UNIT[dtype] * exact.abs() + 2.0**-24
        y = layer(x)
        assert ((y.double() - exact).abs() <= bound).all()
        bias = layer.bias.float()
        held.bias = bias.data_ptr()
        for name, lib in (*emulated.items(), *((name, library.load(name)) for name in instruction_sets.available())):
            assert torch.equal(products.multiply(lib, held, x, 1 + rows % 3), y), (name, rows)
    after = layer.state_dict()
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
    assert torch.equal(layer.dequantize(), weight.dequantize())


@pytest.mark.parametrize("byte", [0, 1, 8, 127, 245, 254, 255])
def test_scales_of_blocks(byte):
    """The least, the largest, and the one that is no number."""
    grid = BlockFloat(8)
    codes = torch.full((33, 64), 0x38, dtype=torch.uint8)  # 1
    scale = torch.full((33, 2), 127, dtype=torch.uint8)
    scale[:, 1] = byte
    weight = CompressedWeight.of(codes.view(torch.float8_e4m3fn), {"scale": scale}, None, Scheme(grid), torch.float32)
    layer, _ = linear(weight.scheme, (33, 64), torch.float32, weight=weight)
    layer.bias.data.zero_()
    layer.prepare("float8-c")
    x = torch.zeros(2, 64)
    x[0, 0], x[1, 40] = 1.0, 0.5
    y = layer(x)
    if byte == 255:
        assert not y[1].isfinite().any()
        return
    assert (y[0] == 1).all()
    assert (y[1].double() == 0.5 * 2.0 ** (byte - 127)).all()


def test_a_code_of_a_block_that_is_no_number():
    weight = random_weight(Scheme(BlockFloat(8)), (40, 64), torch.float32)
    weight.values.view(torch.uint8)[5, 33], weight.values.view(torch.uint8)[6, 0] = 0x7F, 0xFF
    layer, _ = linear(weight.scheme, (40, 64), torch.float32, weight=weight)
    layer.prepare("float8-c")
    assert (layer(torch.randn(3, 64)).isnan() == torch.isin(torch.arange(40), torch.tensor([5, 6]))).all()
    assert layer.dequantize().isnan().sum() == 2


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
