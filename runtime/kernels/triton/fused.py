"""RMSNorm (with the residual addition) and SwiGLU, one pass over memory each. Arithmetic in float32, rounded where transformers
rounds.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton.codes import row_major
from runtime.kernels.triton.jit import cdiv, entry, next_power_of_2, tl


@entry
def rms_norm_kernel(
    x, residual, weight, out, total, stride, residual_stride, K, epsilon,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + at, mask=at < K, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + at, mask=at < K, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(total + row * K + at, rounded, mask=at < K)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / K + epsilon)
    normal = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    y = normal * tl.load(weight + at, mask=at < K, other=0.0).to(tl.float32)
    tl.store(out + row * K + at, y.to(out.dtype.element_ty), mask=at < K)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h = x + residual` and `weight * h / rms(h)`: `x`, `residual` `[..., K]` -> (normalized, h), in the dtype of `x`.

    K up to 65536 (a row is held in registers). Without a residual the second result is `x`.
    """
    flat = _rows(x)
    rows, columns = flat.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    beside = flat if residual is None else _rows(residual)
    if out.numel():
        block = next_power_of_2(columns)
        rms_norm_kernel[(rows,)](
            flat, beside, weight, out, total, flat.stride(0), beside.stride(0), columns, epsilon,
            HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return out, total


@entry
def swiglu_kernel(x, out, stride, SIZE, BLOCK: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + at, (silu * up).to(out.dtype.element_ty), mask=at < SIZE)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[..., 2 I]`, gate first -> `[..., I]`."""
    flat, size = _rows(x), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(1024, next_power_of_2(size))
        swiglu_kernel[(flat.shape[0], cdiv(size, block))](flat, out, flat.stride(0), size, BLOCK=block, num_warps=4)
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, K]` with dense rows."""
    return row_major(x.reshape(-1, x.shape[-1]))
