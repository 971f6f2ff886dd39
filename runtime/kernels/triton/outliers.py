"""Outliers of row codebooks: weights stored singly, as many in each row, added to a product in which others stood in their places."""

from __future__ import annotations

import torch

from runtime.kernels.triton.codes import load_scale, row_major
from runtime.kernels.triton.jit import cdiv, entry, tl
from runtime.kernels.triton.layout import Weight

_ROWS, _COUNT = 16, 16  # of the weight, and outliers of each, that are read together


@entry
def outliers_kernel(
    y, x, columns, values, scale, table, out,
    stride, M, N, count,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    owned, row = tl.minimum(n, N - 1), tl.minimum(m, M - 1).to(tl.int64)
    # Among the codes an outlier has number 0, so its row's first level was multiplied.
    level = ((tl.load(table + owned) & 255) - 128).to(tl.float32)[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_C], tl.float32)
    for first in range(0, count, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        at, inside = owned.to(tl.int64)[:, None] * count + c[None, :], (c < count)[None, :]
        column = tl.load(columns + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
        group = owned[:, None] + column * 0
        if GROUP != 0:
            group += (column // GROUP) * N
        more = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) - level * load_scale(scale + group)
        more = tl.where(inside, more, 0.0)
        sums += tl.load(x + row[:, None, None] * stride + column[None, :, :]).to(tl.float32) * more[None, :, :]
    at, inside = m.to(tl.int64)[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) + tl.sum(sums, 2)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add(y: torch.Tensor, x: torch.Tensor, weight: Weight, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The product of `x` `[M, K]` with a weight of tables and its outliers -> `[M, N]` in the dtype of `y`.

    Args:
        y: the product without them.
        columns: int16 `[N, count]`, unsigned, in ascending order.
        values: `[N, count]`, what stands in these columns instead of the table's first entry.
    """
    x = row_major(x)
    (rows, _), (n, _), count = x.shape, weight.shape, columns.shape[1]
    if not y.numel() or not count:
        return y
    out, block = torch.empty_like(y), 1 if rows == 1 else 8
    outliers_kernel[(cdiv(n, _ROWS), cdiv(rows, block))](
        y, x, columns, values, weight.scale, weight.table, out, x.stride(0), rows, n, count,
        GROUP=weight.group, BLOCK_M=block, BLOCK_N=_ROWS, BLOCK_C=_COUNT, num_warps=4,
    )  # fmt: skip
    return out
