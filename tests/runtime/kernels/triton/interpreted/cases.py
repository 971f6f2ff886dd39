"""Random and hostile weights and inputs."""

import torch
from triton_references import block_floats, reorder

from runtime.kernels.triton import layout

# (N, K, group, asymmetric): ones, primes, nothing a multiple of anything, ragged last groups, whole tiles, group 0 = channel
WEIGHTS = [
    (1, 1, 0, False),
    (1, 1, 0, True),
    (3, 16, 16, False),
    (7, 172, 16, True),
    (9, 149, 48, True),
    (11, 256, 128, False),
    (9, 528, 128, True),
    (5, 100, 32, False),
    (17, 512, 256, False),
    (4, 272, 0, True),
]


def weight(n, k, group, asymmetric, field, dtype=torch.bfloat16, seed=0):
    """Codes over the whole range; scales of both signs, some zero."""
    generator = torch.Generator().manual_seed(seed)
    low, groups = -(1 << field - 1), -(-k // group) if group else 1
    codes = torch.randint(low, -low, (n, k), dtype=torch.int8, generator=generator)
    scale = ((torch.rand(n, groups, generator=generator) - 0.4) * 0.1).to(dtype)
    if n > 2:
        scale[1] = 0
    zero = torch.randint(low, -low, (n, groups), dtype=torch.int8, generator=generator) if asymmetric else None
    packed = reorder(codes, scale, zero, group, field)
    assert torch.equal(layout.unpack(packed.words, field, k), codes)
    return packed


# (N, K, format)
BLOCK_FLOATS = [
    (1, 32, "mxfp4"),
    (7, 160, "mxfp4"),
    (17, 544, "mxfp4"),
    (1, 16, "nvfp4"),
    (9, 176, "nvfp4"),
    (17, 528, "nvfp4"),
    (1, 32, "mxfp8"),
    (7, 160, "mxfp8"),
    (17, 544, "mxfp8"),
]


def block_float(n, k, name, seed=0):
    """Codes over the whole grid, both zeros included, under scales that differ by much; the largest and the least of e4m3 among them."""
    generator, bits = torch.Generator().manual_seed(seed), int(name[-1])
    fields = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    if bits == 8:
        fields[fields % 128 == 127] = 0  # NaN
    if name != "nvfp4":
        scale = torch.randint(110, 122, (n, k // 32), dtype=torch.uint8, generator=generator)
        return block_floats(fields, scale, bits)
    scale = (torch.rand(n, k // 16, generator=generator) * 448).to(torch.float8_e4m3fn)
    scale.view(torch.uint8)[:, 0] = torch.tensor([0x7E, 1])[torch.arange(n) % 2].to(torch.uint8)
    return block_floats(fields, scale, bits, torch.tensor([1234.5]))


def rows(m, k, dtype=torch.bfloat16, seed=0, strided=False):
    """Activations, one row of zeros from three on; `strided`: rows further apart than they are long."""
    x = torch.randn(m, k + (5 if strided else 0), generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[:, k:] = float("nan")
    x = x[:, :k]
    if m > 2:
        x[1] = 0
    return x


def assert_close(y, expected, dtype):
    """Each element within the rounding of the result and some of the largest terms that were added."""
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    rounding = torch.finfo(dtype).eps
    worst = (y.double() - expected).abs() - expected.abs() * rounding
    assert worst.max() <= 2e-5 * expected.abs().max() + 1e-9 if expected.numel() else True, float(worst.max())
