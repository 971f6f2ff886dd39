import dataclasses

import pytest
import torch
import triton_references as references
from cases import BLOCK_FLOATS, WEIGHTS, assert_close, block_float, rows, weight

from runtime.kernels.triton import layout, semi_structured
from runtime.kernels.triton.matmul import configurations, dequantize, matmul


@pytest.mark.parametrize("field", [4, 8])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_matmul(case, field):
    check(weight(*case, field), case)


@pytest.mark.parametrize("case", BLOCK_FLOATS, ids=str)
def test_block_floats(case):
    check(block_float(*case), case)


def check(w, case):
    for m, dtype, scale, config in (
        (1, torch.bfloat16, torch.bfloat16, {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_K": 1, "STAGES": 2, "num_warps": 4}),
        (33, torch.float16, torch.float32, {"BLOCK_M": 32, "BLOCK_N": 16, "SPLIT_K": 3, "STAGES": 2, "num_warps": 4}),
        (66, torch.float16, torch.float16, {"BLOCK_M": 64, "BLOCK_N": 16, "SPLIT_K": 2, "STAGES": 2, "num_warps": 4}),
        (3, torch.bfloat16, torch.float16, None),
        (66, torch.bfloat16, torch.bfloat16, None),
    ):
        w = dataclasses.replace(w, scale=w.scale.to(scale)) if w.scale.is_floating_point() else w
        x, bias = rows(m, case[1], dtype, strided=True), rows(1, case[0], dtype, 1)[0]
        # Scales multiply sums of float32, or the weight is rounded to the dtype of x, as by the reference kernel, or it is exact in
        # that before e4m3 scales are divided.
        rounded = m > 33 and w.group and w.global_scale is None
        held = dtype if rounded else torch.float64
        expected = x.double() @ references.dequantize(w, held).double().t() + bias.double()
        with references.forced(config):
            assert_close(matmul(x, w, bias), expected, dtype)
    x = x.contiguous()  # with AMX, torch's linear multiplies what lies between rows by zero, and NaN stays NaN
    with references.forced({"dense": True}):
        dense = matmul(x, w, bias)
    assert torch.equal(dense, torch.nn.functional.linear(x, references.dequantize(w, dtype), bias))
    assert matmul(x[:0], w).shape == (0, case[0])


@pytest.mark.parametrize("count", [3, 65])
def test_a_weight_without_columns(count):
    w = layout.Weight(torch.empty(0, 5, 16, dtype=torch.int32), torch.ones(1, 5), None, (5, 0), 0, 4)
    bias = torch.arange(5).bfloat16()
    assert torch.equal(matmul(torch.empty(count, 0, dtype=torch.bfloat16), w, bias), bias.expand(count, 5))


@pytest.mark.parametrize("field", [4, 8])
def test_zero_points_at_the_ends(field):
    """Codes and zero points at both ends of their range: the largest differences."""
    ends = torch.tensor([-(1 << field - 1), (1 << field - 1) - 1], dtype=torch.int8)
    codes, zero = ends[torch.randint(0, 2, (6, 256))], ends[torch.randint(0, 2, (6, 2))]
    w = references.reorder(codes, torch.rand(6, 2).bfloat16(), zero, 128, field)
    for dtype in (torch.bfloat16, torch.float16):
        x = rows(5, 256, dtype)
        assert_close(matmul(x, w), x.double() @ references.dequantize(w, torch.float64).t(), dtype)


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
