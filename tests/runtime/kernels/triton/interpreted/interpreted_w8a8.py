import itertools

import pytest
import torch
import triton_references
from cases import assert_close, rows

from runtime.formats.scheme import ActivationScheme
from runtime.kernels.activations import quantize_input
from runtime.kernels.triton import float8_block, w8a8

SPLIT = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "SPLIT_K": 3, "num_warps": 4, "STAGES": 2}


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 97), (5, 4100), (4, 256)])
def test_quantize_gives_the_codes_of_the_reference(shape, dtype, float8):
    x = rows(*shape, dtype, strided=True) * 3
    codes, scale, total = w8a8.quantize(x, float8)
    expected, grid, _ = quantize_input(x, ActivationScheme(8, "float" if float8 else "int"), {})
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scale, grid.float().flatten())
    if not float8:
        assert torch.equal(total, codes.sum(1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 128), (3, 384), (2, 4224)])
def test_float8_groups_have_the_codes_of_the_reference(shape, dtype):
    x = rows(*shape, dtype, strided=True) * 3
    codes, scale = w8a8.quantize_groups(x, True, 128)
    scheme = ActivationScheme(8, "float", strategy="group", group_size=128)
    expected, grid, _ = quantize_input(x.unflatten(1, (-1, 128)), scheme, {})
    assert torch.equal(codes.float(), expected.flatten(1).float())
    assert torch.equal(scale, grid.float().squeeze(-1))


@pytest.mark.parametrize("height", [1, 32, 128])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        *itertools.product([(1, 128, 1), (5, 384, 33), (70, 256, 150)], [False, True]),
        ((3, 300, 40), False),  # no whole groups of inputs
    ],
)
def test_product_of_blocks(shape, height, groups):
    (m, k, n), generator, dtype = shape, torch.Generator().manual_seed(1), torch.bfloat16
    x, w = ((torch.randn(size, k, generator=generator) * 100).clamp(-448, 448).to(w8a8.FLOAT8) for size in (m, n))
    scale = torch.rand(m, k // 128 if groups else 1, generator=generator)
    weight_scale = (torch.rand(-(-n // height), -(-k // 128), generator=generator) * 0.01).to(dtype)
    bias = rows(1, n, dtype)[0]
    wide = weight_scale.double().repeat_interleave(height, 0)[:n].repeat_interleave(128, 1)[:, :k] * w.double()
    expected = (x.double() * scale.double().repeat_interleave(128 if groups else k, 1)) @ wide.T + bias.double()
    for config in (None, SPLIT | {"BLOCK_K": 128}):
        with triton_references.forced(config):
            y = float8_block.product(x, scale, w, weight_scale, height, dtype, bias)
        assert_close(y, expected, dtype)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 97, 33), (20, 300, 7), (3, 1024, 17), (70, 64, 40)])
def test_product(shape, float8):
    (m, k, n), generator, dtype = shape, torch.Generator().manual_seed(1), torch.bfloat16

    def codes(*size):
        if float8:
            return (torch.randn(size, generator=generator) * 100).clamp(-448, 448).to(w8a8.FLOAT8)
        return torch.randint(-128, 128, size, dtype=torch.int8, generator=generator)

    x, w = codes(m, k), codes(n, k)
    scale = torch.rand(m, generator=generator)
    weight_scale, bias = ((torch.rand(n, generator=generator) - 0.3) * 0.01).to(dtype), rows(1, n, dtype)[0]
    for config in (None, SPLIT):
        with triton_references.forced(config):
            y = w8a8.product(x, scale, w, weight_scale, dtype, bias)
        assert_close(y, triton_references.w8a8(x, scale, w, weight_scale, bias), dtype)
    if float8:
        return
    zero = torch.randint(-128, 128, (m,), dtype=torch.int32, generator=generator)
    weight_zero = torch.randint(-128, 128, (n,), dtype=torch.int8, generator=generator)
    for config in (None, SPLIT):
        for z, wz in ((zero, None), (None, weight_zero), (zero, weight_zero)):
            sums = x.sum(1, dtype=torch.int32), w.sum(1, dtype=torch.int32)
            with triton_references.forced(config):
                y = w8a8.product(x, scale, w, weight_scale, dtype, bias, z, wz, *sums)
            assert_close(y, triton_references.w8a8(x, scale, w, weight_scale, bias, z, wz), dtype)
