"""Between the q/k/v product and attention, in one pass: norms of the heads, rotation, keys and values into their pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.engines.cuda.cache import CacheLayer, Rows
from runtime.kernels.triton.jit import entry, next_power_of_2, tl


@entry
def rotary_store_kernel(
    q, k, v, q_norm, k_norm, rotations, positions, slots, out, keys, values,
    q_stride, k_stride, v_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    row, head = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64) * (KV_HEADS * SIZE)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    if head >= HEADS + KV_HEADS:
        at = (head - HEADS - KV_HEADS) * SIZE + d
        tl.store(values + slot + at, tl.load(v + row * v_stride + at, mask=inside, other=0.0), mask=inside)
    else:
        if head < HEADS:
            source, target, norm = q + row * q_stride + head * SIZE, out + (row * HEADS + head) * SIZE, q_norm
        else:
            source = k + row * k_stride + (head - HEADS) * SIZE
            target, norm = keys + slot + (head - HEADS) * SIZE, k_norm
        # The element that d is rotated with. Past the rotated part: itself, by an angle of nothing.
        pair = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
        angle = tl.load(positions + row).to(tl.int64) * (2 * HALF) + tl.where(d < HALF, d, d - HALF)
        turns = d < 2 * HALF
        x = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
            dtype = keys.dtype.element_ty
            x = (x * scale).to(dtype).to(tl.float32) * tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
            y = (y * scale).to(dtype).to(tl.float32) * tl.load(norm + pair, mask=inside, other=0.0).to(tl.float32)
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        cosine = tl.load(rotations + angle, mask=turns, other=1.0)
        sine = tl.load(rotations + angle + HALF, mask=turns, other=0.0)
        turned = x * cosine + tl.where(d < HALF, -y, y) * sine
        tl.store(target + d, turned.to(keys.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Sequence[Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotations: Tensor,
    rows: Rows,
    layer: CacheLayer,
) -> Tensor:
    """`ops.rotate_and_store`, its reference."""
    q, k, v = qkv
    keys, values, _ = layer
    kv_heads, size = keys.shape[-2:]
    count, heads = q.shape[0], q.shape[1] // size
    out = torch.empty(count, heads, size, dtype=q.dtype, device=q.device)
    if count:
        assert q.stride(1) == k.stride(1) == v.stride(1) == 1, "rows must be dense"
        assert keys.is_contiguous(), "pages lie one after another"
        assert values.is_contiguous(), "pages lie one after another"
        q_norm, k_norm = norms or (q, q)
        rotary_store_kernel[(count, heads + 2 * kv_heads)](
            q, k, v, q_norm, k_norm, rotations, rows.positions, rows.slots, out, keys, values,
            q.stride(0), k.stride(0), v.stride(0), eps,
            HEADS=heads, KV_HEADS=kv_heads, SIZE=size, HALF=rotations.shape[1] // 2, BLOCK=next_power_of_2(size),
            NORMS=norms is not None, num_warps=1,
        )  # fmt: skip
    return out
