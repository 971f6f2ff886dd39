"""Inputs rounded to block floats: those of the reference, bit for bit, whatever they hold."""

import pytest
import torch
from cases import rows

from runtime.formats.presets import preset
from runtime.formats.scheme import ActivationScheme
from runtime.kernels.activations import fake_quantize
from runtime.kernels.triton.block_float import round_inputs

SCHEMES = {name: preset(name).activations for name in ("NVFP4", "MXFP4", "MXFP8")}
SCHEMES["float8 with scales of e4m3"] = ActivationScheme(8, "float", True, "local", "tensor_group", 64, "e4m3")


def check(x, name, common=3000.0):
    scheme = SCHEMES[name]
    tensors = {"input_global_scale": torch.tensor([common])} if scheme.scales == "e4m3" else {}
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
        for common in (3000.0, 1e-3, 1e30):
            check(x, name, common)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_holds_no_numbers(name, wrong):
    x = rows(3, 256)
    x[2, 70], x[2, 71] = wrong, -1.5
    check(x, name)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_rows(name):
    check(rows(3, 64)[:0], name)
