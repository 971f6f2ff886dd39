"""Rounded inputs times 4-bit weights: codes of the reference, products against float64, tokens that hold no numbers."""

import pytest
import torch
import triton_references
from cases import WEIGHTS, assert_close, rows, weight

from runtime.formats.scheme import ActivationScheme
from runtime.kernels.activations import quantize_input
from runtime.kernels.triton import rounded, w8a8

SPLIT = {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_K": 3, "num_warps": 4, "STAGES": 2}


@pytest.mark.parametrize("bits", [2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_tokens_are_those_of_the_reference(bits, dtype):
    x = rows(4, 300, dtype, strided=True) * 3
    codes, scale, total = w8a8.quantize(x, False, bits)
    expected, grid, _ = quantize_input(x, ActivationScheme(bits), {})
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scale, grid.float().flatten())
    assert torch.equal(total, codes.sum(1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "bits", "group", "tail"),
    [
        ((1, 32), 4, 32, 0),
        ((3, 96), 8, 32, 0),
        ((5, 384), 4, 32, 64),
        ((4, 4224), 3, 128, 128),
        ((2, 6144), 4, 2048, 4096),
    ],
)
def test_codes_of_groups_are_those_of_the_reference(shape, bits, group, tail, dtype):
    x = rows(*shape, dtype, strided=True) * 3
    codes, scale = w8a8.quantize_groups(x, False, group, bits, tail)
    few = shape[1] - tail
    for part, at, own in (
        (slice(0, few), slice(0, few // group), bits),
        (slice(few, None), slice(few // group, None), 8),
    ):
        grouped = x[:, part].unflatten(1, (-1, group))
        expected, grid, _ = quantize_input(grouped, ActivationScheme(own, strategy="group", group_size=group), {})
        assert torch.equal(codes[:, part].float(), expected.flatten(1).float())
        assert torch.equal(scale[:, at], grid.float().squeeze(-1))


@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize(
    ("n", "k", "group", "asymmetric", "x_group"),
    [
        (*each, x_group)
        for each in WEIGHTS
        for x_group in (0, 32, 128, "float8")
        if each[2] % 32 == 0 and (not isinstance(x_group, int) or not x_group or each[1] % x_group == 0)
    ],
)
def test_product(m, n, k, group, asymmetric, x_group):
    dtype, generator = torch.bfloat16, torch.Generator().manual_seed(m)
    w = weight(n, k, group, asymmetric, 4)
    codes = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator)
    if x_group == "float8":
        codes, x_group = (codes * 3.3).to(w8a8.FLOAT8), 0
    scale = torch.rand(m, k // x_group if x_group else 1, generator=generator)
    bias = rows(1, n, dtype)[0]
    x = codes.double() * scale.double().repeat_interleave(x_group or k, 1)
    for config in (None, SPLIT):
        with triton_references.forced(config):
            y = rounded.product(codes, scale, w, x_group, dtype, bias)
        assert_close(y, triton_references.linear(x, w, bias), dtype)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_holds_no_numbers_spoils_only_itself(wrong):
    w = weight(9, 128, 32, False, 4)
    x = rows(5, 128)

    def of_tokens(x):
        codes, scale, _ = w8a8.quantize(x, False, 4)
        return rounded.product(codes, scale[:, None], w, 0, x.dtype)

    def of_floats(x):
        codes, scale, _ = w8a8.quantize(x, True)
        return rounded.product(codes, scale[:, None], w, 0, x.dtype)

    def of_groups(x):
        return rounded.product(*w8a8.quantize_groups(x, False, 32, 4, 32), w, 32, x.dtype)

    for multiply in (of_tokens, of_floats, of_groups):
        expected = multiply(x)
        spoiled = x.clone()
        spoiled[2, 70] = wrong
        y = multiply(spoiled)
        assert not bool(y[2, w.scale.abs().amin(0) > 0].isfinite().any())
        assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
