import pytest
import torch

from runtime.engines.cuda import reference
from runtime.kernels.triton import fused

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def close(y, expected, steps=1):
    """Within so many roundings of the dtype."""
    assert y.dtype == expected.dtype
    error = (y.double() - expected.double()).abs()
    assert bool((error <= expected.double().abs() * steps * torch.finfo(y.dtype).eps + 1e-6).all()), float(error.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 37), (2, 1000), (0, 8)])
def test_rms_norm(shape, dtype):
    x, residual, w = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    if x.shape[0] > 1:
        x[0] = 0
    for beside in (None, residual):
        (y, h), (expected, total) = fused.rms_norm(x, w, 1e-5, beside), reference.rms_norm(x, w, 1e-5, beside)
        assert torch.equal(h, total)
        close(y, expected, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (4, 3, 154), (2, 2600), (0, 4)])
def test_swiglu(shape, dtype):
    x = torch.randn(shape).to(dtype) * 30
    close(fused.swiglu(x), reference.swiglu(*x.chunk(2, -1)), 2)
