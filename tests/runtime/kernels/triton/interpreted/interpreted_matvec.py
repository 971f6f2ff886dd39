import pytest
import torch
from cases import BLOCK_FLOATS, WEIGHTS, assert_close, block_float, rows, weight
from triton_references import forced, linear

from runtime.kernels.triton.matvec import matvec

FORMATS = ("mxfp4", "nvfp4", "mxfp8")
SMALL = {"BLOCK_N": 4, "TILES": 2, "SPLIT_K": 1, "num_warps": 4}


@pytest.mark.parametrize("field", [4, 8])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_matvec(case, field):
    check(weight(*case, field), case)


@pytest.mark.parametrize("case", BLOCK_FLOATS, ids=str)
def test_block_floats(case):
    check(block_float(*case), case)


def check(w, case):
    small = SMALL | {"BLOCK_N": 16 if case[0] > 16 else 4}
    for m, dtype, config in (
        (1, torch.bfloat16, None),
        (1, torch.bfloat16, small),
        (2, torch.float16, small | {"SPLIT_K": 3}),
    ):
        x, bias = rows(m, case[1], dtype, strided=True), rows(1, case[0], dtype, 1)[0]
        expected = linear(x, w, bias)
        with forced(config):
            assert_close(matvec(x, w, bias), expected, dtype)
    assert_close(matvec(x[:0], w), expected[:0], dtype)


@pytest.mark.parametrize("w", [weight(5, 300, 64, True, 4), *(block_float(5, 320, each) for each in FORMATS)])
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_range_of_activations(size, w):
    x = (rows(1, w.shape[1]) * size).contiguous()
    assert_close(matvec(x, w) / size, linear(x, w) / size, torch.bfloat16)


def test_columns_across_memory():
    w, x = weight(8, 200, 0, False, 4), rows(200, 2).t()
    assert_close(matvec(x, w), linear(x, w), torch.bfloat16)


def test_repeats_bit_for_bit():
    w, x = weight(9, 1000, 16, False, 4), rows(2, 1000)
    with forced(SMALL | {"SPLIT_K": 2}):
        assert torch.equal(matvec(x, w), matvec(x, w))
