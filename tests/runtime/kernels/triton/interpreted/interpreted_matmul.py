import dataclasses

import pytest
import torch
import triton_references as references
from cases import BLOCK_FLOATS, WEIGHTS, assert_close, block_float, rows, weight

from runtime.kernels.triton import semi_structured
from runtime.kernels.triton.matmul import EXACT_ROWS, configurations, dequantize, matmul


@pytest.mark.parametrize("field", [4, 8])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_matmul(case, field):
    check(weight(*case, field), case)


@pytest.mark.parametrize("case", BLOCK_FLOATS, ids=str)
def test_block_floats(case):
    check(block_float(*case), case)


def check(w, case):
    for m, dtype, config in (
        (1, torch.bfloat16, {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_K": 1, "STAGES": 2, "num_warps": 4}),
        (33, torch.float16, {"BLOCK_M": 32, "BLOCK_N": 16, "SPLIT_K": 3, "STAGES": 2, "num_warps": 4}),
        (66, torch.bfloat16, {"BLOCK_M": 64, "BLOCK_N": 32, "SPLIT_K": 1, "STAGES": 2, "num_warps": 4}),
        (66, torch.float16, {"BLOCK_M": 64, "BLOCK_N": 16, "SPLIT_K": 2, "STAGES": 2, "num_warps": 4}),
        (3, torch.bfloat16, None),
    ):
        x, bias = rows(m, case[1], dtype, strided=True), rows(1, case[0], dtype, 1)[0]
        # In small blocks nothing of the weight is rounded. In large ones it is to the dtype of x, as by the reference kernel, or it is
        # exact in that before e4m3 scales are divided.
        small = (config or {"BLOCK_M": m})["BLOCK_M"] <= EXACT_ROWS
        held = dtype if not small and w.global_scale is None else torch.float64
        expected = x.double() @ references.dequantize(w, held).double().t() + bias.double()
        with references.forced(config):
            assert_close(matmul(x, w, bias), expected, dtype)
    x = x.contiguous()  # with AMX, torch's linear multiplies what lies between rows by zero, and NaN stays NaN
    with references.forced({"dense": True}):
        dense = matmul(x, w, bias)
    assert torch.equal(dense, torch.nn.functional.linear(x, references.dequantize(w, dtype), bias))
    assert matmul(x[:0], w).shape == (0, case[0])


@pytest.mark.parametrize("field", [4, 8])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_dequantize_bit_for_bit(case, field):
    for dtype in (torch.bfloat16, torch.float16):
        w = weight(*case, field, dtype)
        assert torch.equal(dequantize(w, dtype), references.dequantize(w, dtype))


@pytest.mark.parametrize("case", BLOCK_FLOATS, ids=str)
def test_block_floats_dequantize_bit_for_bit(case):
    w = block_float(*case)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(dequantize(w, dtype), references.dequantize(w, dtype))


def test_bands_of_blocks():
    """More blocks of rows than a band holds, the last band lower."""
    w, x = weight(40, 130, 16, True, 4), rows(150, 130)
    config = {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_K": 1, "STAGES": 2, "num_warps": 4}
    expected = x.double() @ references.dequantize(w, torch.float64).t()
    with references.forced(config):
        assert_close(matmul(x, w), expected, torch.bfloat16)


def test_sparse_tensor_cores_are_offered_to_weights_of_two_of_four(monkeypatch):
    plain, x = weight(32, 128, 16, True, 4), rows(300, 128)
    w = dataclasses.replace(plain, two_of_four=True)
    monkeypatch.setattr(semi_structured, "worth_timing", lambda *_: True)
    monkeypatch.setattr(semi_structured, "linear", torch.nn.functional.linear)
    for count in (300, 2048):
        assert {"sparse": True} in configurations(count, w, x.dtype)
        assert {"sparse": True} not in configurations(count, plain, x.dtype)
        assert "sparse" not in configurations(count, w, x.dtype)[0]  # the default needs no measuring
    with references.forced({"sparse": True}):
        y = matmul(x, w)
    with references.forced({"dense": True}):
        assert torch.equal(y, matmul(x, w))
