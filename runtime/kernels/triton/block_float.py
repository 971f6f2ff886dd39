"""Inputs rounded to block floats: float4 or float8 codes with a scale a group, of e8m0 or e4m3, times that scale again.

What comes out is what the reference multiplies, bit for bit: a code times its scale is exact in bfloat16, or rounded as the reference
rounds it. The products are those of weights with unquantized activations.
"""

from __future__ import annotations

import torch

from runtime.formats.scheme import ActivationScheme
from runtime.kernels.triton.codes import row_major
from runtime.kernels.triton.jit import cdiv, entry, jit, tl
from runtime.kernels.triton.w8a8 import magnitude


@jit
def round_float(value, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Nearest floats of `MANTISSA` bits of mantissa, ties to even, whose least normal one is `2^LEAST`; float32, not clamped.

    Added to 1.5 times a power of two, a number is rounded where that ends. GPUs before sm_89 cannot convert to float8.
    """
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 255, LEAST + 127)
    large = (((exponent + (23 - MANTISSA)) << 23) | (1 << 22)).to(tl.float32, bitcast=True)
    return (value + large) - large


@jit
def power_of_two(largest, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Scales e8m0 of groups with these largest magnitudes, as float32: `runtime.kernels.activations._power_of_two`.

    `LIMIT`: exponent (of `frexp`) of the largest code.
    """
    # A quarter of the mantissa more carries into the exponent from 7/4 on.
    exponent = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) + (1 - LIMIT)
    s = tl.maximum(exponent << 23, 1 << 22).to(tl.float32, bitcast=True)  # the least is the subnormal 2^-127
    s = s.to(dtype).to(tl.float32)
    return tl.where(largest < float("inf"), tl.where(s == 0, 1.0, s), float("nan"))


@entry
def round_inputs_kernel(
    x, common, out, stride, K, groups,
    BITS: tl.constexpr, COMMON: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (group < groups)[:, None]
    value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    limit = 6.0 if BITS == 4 else 448.0
    largest = tl.max(magnitude(value), 1)
    # Rounded to the dtype of x where the reference is.
    if COMMON:
        over = tl.load(common)
        s = tl.div_rn(largest, tl.zeros_like(largest) + limit).to(x.dtype.element_ty).to(tl.float32) * over
        s = round_float(tl.minimum(s, 448.0), 3, -6)
        s = tl.div_rn(tl.where(s == 0, 0.125, s), tl.zeros_like(s) + over)
        s = tl.where(tl.max((value != value).to(tl.int32), 1) == 0, s, float("nan"))  # infinities saturate
        code = tl.div_rn(value, tl.zeros_like(value) + s[:, None])
    else:
        s = power_of_two(largest, 3 if BITS == 4 else 9, x.dtype.element_ty)
        code = tl.div_rn(value, tl.zeros_like(value) + s[:, None]).to(x.dtype.element_ty).to(tl.float32)
    code = tl.minimum(tl.maximum(code, -limit), limit)
    code = round_float(code, 1, 0) if BITS == 4 else round_float(code, 3, -6)
    tl.store(out + row * K + at, (code * s[:, None]).to(x.dtype.element_ty), mask=inside)


def round_inputs(x: torch.Tensor, scheme: ActivationScheme, common: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `[M, K]` float16 or bfloat16, rounded to codes and back. Reference: `runtime.kernels.activations.fake_quantize`.

    Args:
        scheme: floats with a scale of e8m0 or e4m3 for each group, whose size is a power of two.
        common: float32 `[1]`, what e4m3 scales are divided by.
    """
    x = row_major(x)
    (rows, columns), group = x.shape, scheme.group_size
    assert group is not None
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows:
        groups, block = columns // group, max(1, 1024 // group)
        round_inputs_kernel[(rows, cdiv(groups, block))](
            x, x if common is None else common, out, x.stride(0), columns, groups,
            BITS=scheme.bits, COMMON=common is not None, GROUP=group, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
