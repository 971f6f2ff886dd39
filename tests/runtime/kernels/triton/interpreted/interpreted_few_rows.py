import pytest
import torch
from cases import BLOCK_FLOATS, WEIGHTS, assert_close, block_float, rows, weight
from triton_references import forced, linear

from runtime.kernels.triton.few_rows import few_rows


@pytest.mark.parametrize("field", [4, 8])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_few_rows(case, field):
    check(weight(*case, field), case)


@pytest.mark.parametrize("case", BLOCK_FLOATS, ids=str)
def test_block_floats(case):
    check(block_float(*case), case)


def check(w, case):
    for m, dtype, config in (
        (1, torch.bfloat16, {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_K": 1, "STAGES": 2, "num_warps": 4}),
        (19, torch.float16, {"BLOCK_M": 32, "BLOCK_N": 32, "SPLIT_K": 1, "STAGES": 2, "num_warps": 4}),
        (17, torch.bfloat16, {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_K": 3, "STAGES": 2, "num_warps": 4}),
        (3, torch.bfloat16, None),
    ):
        x, bias = rows(m, case[1], dtype, strided=True), rows(1, case[0], dtype, 1)[0]
        with forced(config):
            assert_close(few_rows(x, w, bias), linear(x, w, bias), dtype)
    assert few_rows(x[:0], w).shape == (0, case[0])
