"""Inputs rounded to block floats: those of the reference, bit for bit, whatever they hold."""

import pytest
import torch
import triton_references
from cases import assert_close, block_float, rows

from runtime.formats.block_float import HALVES
from runtime.formats.presets import preset
from runtime.formats.scheme import ActivationScheme
from runtime.kernels.activations import fake_quantize, quantize_input
from runtime.kernels.triton.block_float import product, quantize, round_inputs

SCHEMES = {name: preset(name).activations for name in ("NVFP4", "MXFP4", "MXFP8")}
SCHEMES["float8 with scales of e4m3"] = ActivationScheme(8, "float", True, "local", "tensor_group", 64, "e4m3")


def check(x, name, global_scale=3000.0):
    scheme = SCHEMES[name]
    tensors = {"input_global_scale": torch.tensor([global_scale])} if scheme.scales == "e4m3" else {}
    y, expected = round_inputs(x, scheme, tensors.get("input_global_scale")), fake_quantize(x, scheme, tensors)
    assert y.dtype == x.dtype
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_those_of_the_reference(name, dtype):
    for shape, size in (((1, 64), 1.0), ((5, 192), 30.0), ((3, 1088), 1e-4), ((2, 4160), 1.0)):
        check(rows(*shape, dtype, seed=shape[0], strided=True) * size, name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number(name, dtype):
    """All there are, once beside others of any size and once beside near ones, so that all are codes and largest of a group."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    mixed = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    for x in (mixed, finite):
        x = x[: len(x) - len(x) % 640].view(-1, 640)
        for global_scale in (3000.0, 1e-3, 1e30) if SCHEMES[name].scales == "e4m3" else (None,):
            check(x, name, global_scale)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_holds_no_numbers(name, wrong):
    x = rows(3, 256)
    x[2, 70], x[2, 71] = wrong, -1.5
    check(x, name)


PRESETS = ("NVFP4", "MXFP4", "MXFP8")
SPLIT = {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_K": 3, "num_warps": 4, "STAGES": 2}


def wide(codes, scale, name):
    """Values of codes and scales as tensor cores are given them, float64 `[M, K]` and `[M, groups]`."""
    if name == "MXFP8":
        values = codes.view(torch.float8_e4m3fn)
    else:
        blocks = codes.unflatten(1, (-1, 8))
        values = HALVES[torch.cat((blocks & 15, blocks >> 4), 2).flatten(1).int()] / 2
    if scale.dtype == torch.int8:
        return values.double(), scale.view(torch.float8_e4m3fn).double()
    nan = (scale == 255).double().masked_fill(scale == 255, float("nan"))
    return values.double(), torch.ldexp(torch.ones(scale.shape, dtype=torch.float64), scale.int() - 127) + nan


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_the_reference(name, dtype):
    scheme, global_scale = SCHEMES[name], torch.tensor([2500.0])
    x = rows(5, 1088, dtype, strided=True) * torch.logspace(-6, 3, 1088).to(dtype)
    x[3, 7], x[3, 50] = float("nan"), float("inf")
    codes, scale = quantize(x, scheme, global_scale if name == "NVFP4" else None)
    expected, grid, _ = quantize_input(
        x.unflatten(1, (-1, scheme.group_size)), scheme, {"input_global_scale": global_scale}
    )
    values, steps = wide(codes, scale, name)
    if name == "NVFP4":
        steps = steps.float() / global_scale
    assert torch.equal(steps.nan_to_num(-1).float(), grid.squeeze(-1).float().nan_to_num(-1))
    numbers = ~steps.isnan().repeat_interleave(scheme.group_size, 1)
    assert torch.equal(values[numbers], expected.flatten(1).double()[numbers])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (5, 17, 160), (70, 9, 544)])
def test_product(name, m, n, k):
    dtype, global_scale = torch.bfloat16, torch.tensor([700.0]) if name == "NVFP4" else None
    w, bias = block_float(n, k, name.lower()), rows(1, n)[0]
    codes, scale = quantize(rows(m, k) * 3, SCHEMES[name], global_scale)
    values, steps = wide(codes, scale, name)
    x = (
        values
        * steps.repeat_interleave(k // steps.shape[1], 1)
        / (1 if global_scale is None else global_scale.double())
    )
    for config in (None, SPLIT):
        with triton_references.forced(config):
            y = product(codes, scale, global_scale, w, dtype, bias)
        assert_close(y, triton_references.linear(x, w, bias), dtype)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_rows(name):
    check(rows(3, 64)[:0], name)
