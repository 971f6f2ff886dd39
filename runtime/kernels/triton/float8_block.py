"""FP8_BLOCK: float8 weights with a scale for each block of rows and 128 columns, times float8 inputs with a scale a token or 128 features.

As DeepSeek-V3 multiplies them (2024, arXiv 2412.19437, section 3.3): sums of 128 columns leave the tensor core's accumulator, which is
short on Hopper, are scaled by both sides and added in float32, in order.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import tuning, w8a8
from runtime.kernels.triton.codes import own_block, store_part
from runtime.kernels.triton.jit import cdiv, entry, tl
from runtime.kernels.triton.layout import BLOCK_COLUMNS
from runtime.kernels.triton.split_k import split_k
from runtime.kernels.triton.tuning import Config


@entry
def float8_block_kernel(
    x, w, x_scale, w_scale, bias, out,
    M, N, K, blocks,
    HEIGHT: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m, n = own_block(M, N, BLOCK_M, BLOCK_N)
    row, owned = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    rows = x + row.to(tl.int64)[:, None] * K
    columns = w + owned.to(tl.int64)[None, :] * K
    row_scale, column_scale = x_scale + row, w_scale + (owned // HEIGHT) * blocks
    if GROUPS:
        row_scale = x_scale + row * blocks
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    share = tl.cdiv(blocks, SPLIT_K)
    first = tl.program_id(1) * share
    for step in tl.range(first, tl.minimum(first + share, blocks), num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN_K:
            a, b = tl.load(rows + k[None, :]), tl.load(columns + k[:, None])
        else:
            a = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            b = tl.load(columns + k[:, None], mask=(k < K)[:, None], other=0.0)
        of_rows = tl.load(row_scale + step) if GROUPS else tl.load(row_scale)
        factor = of_rows[:, None] * tl.load(column_scale + step).to(tl.float32)[None, :]
        sums += tl.dot(a, b, max_num_imprecise_acc=BLOCK_K) * factor
    if HAS_BIAS:
        sums += tl.load(bias + owned).to(tl.float32)[None, :]
    store_part(out, sums, m, n, M, N)


def configurations(rows: int, shape: tuple[int, int]) -> list[Config]:
    """Launches worth trying for a weight `[N, K]`, the default first: those of `w8a8` with small tiles, since there are two sums here."""
    return [each for each in w8a8.configurations(min(rows, 512), shape) if each["BLOCK_K"] == BLOCK_COLUMNS]


def product(
    codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, height: int, dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scaled product of float8 codes: `[M, K]` x `[N, K]` -> `[M, N]` in `dtype`.

    Args:
        scale: float32 `[M, 1]`, or `[M, K / 128]`.
        weight_scale: any float dtype `[N / height, K / 128]`, both rounded up.
    """
    (rows, columns), n, blocks = codes.shape, weight.shape[0], weight_scale.shape[1]

    def launch(config: Config, target: torch.Tensor, bias: torch.Tensor | None) -> None:
        programs = cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
        float8_block_kernel[(programs, config["SPLIT_K"])](
            codes, weight, scale, weight_scale, scale if bias is None else bias, target, rows, n, columns, blocks,
            HEIGHT=height, GROUPS=scale.shape[1] > 1, HAS_BIAS=bias is not None, EVEN_K=columns % BLOCK_COLUMNS == 0, **config,
        )  # fmt: skip

    key = (height, scale.shape[1] > 1, n, columns, tuning.row_class(rows))
    out = torch.empty(rows, n, dtype=dtype, device=codes.device)
    return split_k("float8_block", key, codes, out, bias, configurations(rows, (n, columns)), launch)
