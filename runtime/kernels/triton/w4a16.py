"""W4A16: 4-bit weights (2 to 4 bits, laid out as 4), float16 or bfloat16 activations, any number of rows.

Which kernel: a matrix-vector product without tensor cores for 1 and 2 rows, split-K on tensor cores up to 64, and from there on
a product that dequantizes by tiles or into a scratch matrix. All three read one copy of the weight (`layout.Weight`). 8-bit weights run
in the same kernels, with wider fields (`linear.W8A16Triton`).
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import layout
from runtime.kernels.triton.few_rows import MAXIMUM_ROWS as FEW
from runtime.kernels.triton.few_rows import few_rows
from runtime.kernels.triton.many_rows import many_rows
from runtime.kernels.triton.matvec import MAXIMUM_ROWS as VECTORS
from runtime.kernels.triton.matvec import matvec


def linear(x: torch.Tensor, weight: layout.Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias`: `[M, K]` float16 or bfloat16 -> `[M, N]`. Reference: `layout.reference`."""
    if x.shape[0] <= VECTORS:
        return matvec(x, weight, bias)
    if x.shape[0] <= FEW:
        return few_rows(x, weight, bias)
    return many_rows(x, weight, bias)


def path(rows: int) -> str:
    """What `linear` does for this many rows."""
    if rows <= VECTORS:
        return "matrix-vector product"
    return "split-K tensor cores" if rows <= FEW else "dequantizing matrix product"
