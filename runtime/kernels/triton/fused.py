"""What lies between the matrix products of a Llama-like block, one pass over memory each: RMSNorm (with the residual addition),
rotary embedding, SwiGLU. Arithmetic in float32, rounded where transformers rounds.
"""

from __future__ import annotations

import torch

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

    K up to 65536 (a row is held in registers). Without a residual the second result is `x`. Reference: `rms_norm_reference`.
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


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` as transformers' LlamaRMSNorm computes it."""
    h = x if residual is None else x + residual
    value = h.float()
    normal = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normal.to(x.dtype), h


@entry
def rotary_kernel(
    q, k, cos, sin, q_token, q_head, k_token, k_head, c_token, s_token, Q_HEADS, HEADS, HALF, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.cast(tl.program_id(0), tl.int64)
    head, at = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK)
    low = at < HALF
    c0 = tl.load(cos + token * c_token + at, mask=low, other=0.0).to(tl.float32)[None, :]
    c1 = tl.load(cos + token * c_token + HALF + at, mask=low, other=0.0).to(tl.float32)[None, :]
    s0 = tl.load(sin + token * s_token + at, mask=low, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + token * s_token + HALF + at, mask=low, other=0.0).to(tl.float32)[None, :]
    for_q = (head < Q_HEADS)[:, None] & low[None, :]
    first = q + token * q_token + head.to(tl.int64)[:, None] * q_head + at[None, :]
    a = tl.load(first, mask=for_q, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=for_q, other=0.0).to(tl.float32)
    tl.store(first, (a * c0 - b * s0).to(q.dtype.element_ty), mask=for_q)
    tl.store(first + HALF, (b * c1 + a * s1).to(q.dtype.element_ty), mask=for_q)
    # Heads of k follow those of q in the grid.
    head -= Q_HEADS
    for_k = ((head >= 0) & (head < HEADS - Q_HEADS))[:, None] & low[None, :]
    first = k + token * k_token + head.to(tl.int64)[:, None] * k_head + at[None, :]
    a = tl.load(first, mask=for_k, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=for_k, other=0.0).to(tl.float32)
    tl.store(first, (a * c0 - b * s0).to(k.dtype.element_ty), mask=for_k)
    tl.store(first + HALF, (b * c1 + a * s1).to(k.dtype.element_ty), mask=for_k)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `q` `[tokens, heads, D]` and `k` `[tokens, kv heads, D]` in place; `cos`, `sin` `[tokens, D]`. D even.

    The convention of transformers: element `i` is paired with `i + D / 2`. Only the last dimension must be dense, so views of a
    fused q/k/v tensor do. Reference: `rotary_reference`, which rounds the two products too where these are in float32.
    """
    tokens, heads, size = q.shape
    if size % 2:
        raise ValueError(f"rotary embedding pairs elements, so heads of {size} do not work")
    every = heads + k.shape[1]
    if tokens and every and size:
        for tensor in (q, k, cos, sin):
            assert tensor.stride(-1) == 1, "the last dimension must be dense"
        block = next_power_of_2(size // 2)
        block_h = min(next_power_of_2(every), 8)
        rotary_kernel[(tokens, cdiv(every, block_h))](
            q, k, cos, sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
            heads, every, size // 2, BLOCK=block, BLOCK_H=block_h, num_warps=4 if block * block_h >= 256 else 1,
        )  # fmt: skip
    return q, k


def rotary_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' `apply_rotary_pos_emb` for `[tokens, heads, D]`; not in place."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]

    return turn(q), turn(k)


@entry
def swiglu_kernel(x, out, stride, SIZE, BLOCK: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + at, (silu * up).to(out.dtype.element_ty), mask=at < SIZE)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[..., 2 I]`, gate first -> `[..., I]`. Reference: `swiglu_reference`."""
    flat, size = _rows(x), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(1024, next_power_of_2(size))
        swiglu_kernel[(flat.shape[0], cdiv(size, block))](flat, out, flat.stride(0), size, BLOCK=block, num_warps=4)
    return out


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """`swiglu` in torch."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, K]` with dense rows."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
