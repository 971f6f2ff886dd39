"""W8A8: integer (int8 x int8, sums in int32) and float8 e4m3 products, with the input quantized by a kernel of its own.

`y = s_x s_w (sum q_x q_w - z_w sum q_x - z_x sum q_w + K z_x z_w)`, the bracket in exact integers for int8. The weight `[N, K]`
stays as stored. Few rows take the same kernel with flat tiles and K split among programs (float32 partial sums, added in order).
float8 needs compute capability 8.9; its sums leave the tensor core's accumulator, which is short on Hopper, every `BLOCK_K`.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import tuning
from runtime.kernels.triton.codes import own_block, row_major, store_part
from runtime.kernels.triton.jit import cdiv, entry, jit, next_power_of_2, tl
from runtime.kernels.triton.split_k import split_k, widest_split
from runtime.kernels.triton.tuning import Config

FLOAT8 = torch.float8_e4m3fn


@jit
def magnitude(value):
    """Absolute values of float32 numbers, with NaN as infinity: the maximum then shows whether any number is not finite."""
    size = tl.abs(value)
    return tl.where(size < float("inf"), size, float("inf"))


@entry
def quantize_kernel(
    x, codes, scale, total, stride, K,
    FLOAT: tl.constexpr, BITS: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    x += row * stride
    codes += row * K
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    half: tl.constexpr = 1 << (BITS - 1)
    limit = 448.0 if FLOAT else half - 0.5
    extreme = tl.max(largest, 0)
    # Rounded to the dtype of x after each step, as the reference computes it: same codes, not merely close ones.
    s = tl.div_rn(extreme, limit).to(x.dtype.element_ty).to(tl.float32)
    s = tl.where(s == 0, EPSILON, tl.where(extreme < float("inf"), s, float("nan")))
    tl.store(scale + row, s)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.zeros_like(value) + s).to(x.dtype.element_ty).to(tl.float32)
        if FLOAT:
            value = tl.minimum(tl.maximum(value, -448.0), 448.0)
            tl.store(codes + at, value.to(tl.float8e4nv), mask=at < K)
        else:
            value = tl.minimum(tl.maximum(value, -half), half - 1)
            code = ((value + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: rounds half to even
            count += code
            tl.store(codes + at, code.to(tl.int8), mask=at < K)
    if not FLOAT:
        tl.store(total + row, tl.sum(count, 0))


def quantize(x: torch.Tensor, float8: bool, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Symmetric quantization, one scale a row: `x` `[M, K]` -> codes int8 (or float8 e4m3) `[M, K]`, scale float32 `[M]` (NaN where a row
    holds an infinity or a NaN), sums of the codes int32 `[M]` (undefined for float8). Reference:
    `runtime.kernels.activations.quantize_input`.

    Args:
        bits: of an integer code, 2 to 8.
    """
    x = row_major(x)
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=FLOAT8 if float8 else torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = torch.empty(rows, dtype=torch.int32, device=x.device)
    if rows:
        block = min(4096, next_power_of_2(max(columns, 16)))
        quantize_kernel[(rows,)](
            x, codes, scale, total, x.stride(0), columns,
            FLOAT=float8, BITS=bits, EPSILON=torch.finfo(x.dtype).eps, BLOCK=block, num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return codes, scale, total


@entry
def quantize_groups_kernel(
    x, codes, scale, stride, K, groups, few,
    FLOAT: tl.constexpr, BITS: tl.constexpr, EPSILON: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (group < groups)[:, None]
    value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    half = tl.where(group < few, 1 << (BITS - 1), 128).to(tl.float32)
    largest = tl.max(magnitude(value), 1)
    limit = tl.zeros_like(largest) + 448.0 if FLOAT else half - 0.5
    s = tl.div_rn(largest, limit).to(x.dtype.element_ty).to(tl.float32)
    s = tl.where(s == 0, EPSILON, tl.where(largest < float("inf"), s, float("nan")))
    tl.store(scale + row * groups + group, s, mask=group < groups)
    value = tl.div_rn(value, tl.zeros_like(value) + s[:, None]).to(x.dtype.element_ty).to(tl.float32)
    if FLOAT:
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        tl.store(codes + row * K + at, value.to(tl.float8e4nv), mask=inside)
    else:
        value = tl.minimum(tl.maximum(value, -half[:, None]), half[:, None] - 1)
        tl.store(codes + row * K + at, ((value + 12582912.0) - 12582912.0).to(tl.int8), mask=inside)


def quantize_groups(
    x: torch.Tensor, float8: bool, group: int, bits: int = 8, int8_tail: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize`, one scale a group: `x` `[M, K]` -> codes `[M, K]`, scales float32 `[M, K / group]`.

    Args:
        group: a power of two that divides K. bits: of an integer code, 2 to 8.
        int8_tail: columns at the end, whole groups, whose codes have 8 bits.
    """
    x = row_major(x)
    (rows, columns), device = x.shape, x.device
    groups = columns // group
    codes = torch.empty(rows, columns, dtype=FLOAT8 if float8 else torch.int8, device=device)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=device)
    if rows:
        block = max(1, 2048 // group)
        quantize_groups_kernel[(rows, cdiv(groups, block))](
            x, codes, scale, x.stride(0), columns, groups, groups - int8_tail // group,
            FLOAT=float8, BITS=bits, EPSILON=torch.finfo(x.dtype).eps, GROUP=group, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return codes, scale


@entry
def w8a8_kernel(
    x, w, x_scale, w_scale, x_zero, w_zero, x_sum, w_sum, bias, out,
    M, N, K,
    FLOAT: tl.constexpr, X_ZERO: tl.constexpr, W_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m, n = own_block(M, N, BLOCK_M, BLOCK_N)
    row, owned = tl.minimum(m, M - 1), tl.minimum(n, N - 1)  # repeated past the end, and not stored
    rows = x + row.to(tl.int64)[:, None] * K
    columns = w + owned.to(tl.int64)[None, :] * K
    if FLOAT:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = tl.program_id(1) * share
    for step in tl.range(first, tl.minimum(first + share, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN_K:
            a, b = tl.load(rows + k[None, :]), tl.load(columns + k[:, None])
        else:
            a = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            b = tl.load(columns + k[:, None], mask=(k < K)[:, None], other=0.0)
        if FLOAT:
            sums = tl.dot(a, b, sums, max_num_imprecise_acc=BLOCK_K)
        else:
            sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    if tl.program_id(1) == 0:
        if W_ZERO:
            wz = tl.load(w_zero + owned).to(tl.int32)[None, :]
            sums -= wz * tl.load(x_sum + row)[:, None]
        if X_ZERO:
            xz = tl.load(x_zero + row)[:, None]
            sums -= xz * tl.load(w_sum + owned)[None, :]
            if W_ZERO:
                sums += (K * xz) * wz
    y = sums.to(tl.float32) * tl.load(x_scale + row)[:, None] * tl.load(w_scale + owned).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + owned).to(tl.float32)[None, :]
    store_part(out, y, m, n, M, N)


def configurations(rows: int, shape: tuple[int, int]) -> list[Config]:
    """Launches worth trying for a weight `[N, K]`, the default first."""
    if rows <= 64:
        m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        split = widest_split(shape[0] // 64, 256, shape[1] // 256)
        chosen = [(m, 64, 128, split, 4, 4), (m, 64, 256, split, 4, 3), (m, 128, 128, split, 4, 4), (m, 32, 256, split, 4, 3),
                  (m, 64, 128, 2 * split, 4, 4)]  # fmt: skip
    elif rows <= 512:
        chosen = [(64, 128, 128, 1, 4, 4), (128, 64, 128, 1, 4, 4), (128, 128, 128, 1, 8, 3), (64, 128, 128, 2, 4, 4),
                  (64, 64, 128, 2, 4, 4)]  # fmt: skip
    else:
        chosen = [(128, 128, 128, 1, 8, 3), (128, 256, 128, 1, 8, 3), (256, 128, 128, 1, 8, 3), (128, 128, 128, 1, 4, 3),
                  (128, 256, 64, 1, 8, 4)]  # fmt: skip
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K", "num_warps", "STAGES")
    return [dict(zip(names, c, strict=True)) for c in chosen]


def product(
    codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype,
    bias: torch.Tensor | None = None, x_zero: torch.Tensor | None = None, w_zero: torch.Tensor | None = None,
    x_sum: torch.Tensor | None = None, w_sum: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scaled product of codes: int8 or float8 `[M, K]` x `[N, K]` -> `[M, N]` in `dtype`.

    Args:
        scale: float32 `[M]`. weight_scale: float `[N]`.
        x_zero: zero points of int8 inputs, int32 `[M]`, with `w_sum`, int32 `[N]`, sums of the weight's codes.
        w_zero: zero points of an int8 weight, int8 `[N]`, with `x_sum`, int32 `[M]`, sums of the inputs' codes.
    """
    (rows, columns), n = codes.shape, weight.shape[0]
    float8 = codes.dtype == FLOAT8

    def launch(config: Config, target: torch.Tensor, bias: torch.Tensor | None) -> None:
        blocks = cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
        w8a8_kernel[(blocks, config["SPLIT_K"])](
            codes, weight, scale, weight_scale,
            *(scale if each is None else each for each in (x_zero, w_zero, x_sum, w_sum)),
            scale if bias is None else bias, target, rows, n, columns,
            FLOAT=float8, X_ZERO=x_zero is not None, W_ZERO=w_zero is not None, HAS_BIAS=bias is not None,
            EVEN_K=columns % config["BLOCK_K"] == 0, **config,
        )  # fmt: skip

    key = (float8, n, columns, tuning.row_class(rows))
    out = torch.empty(rows, n, dtype=dtype, device=codes.device)
    return split_k("w8a8", key, codes, out, bias, configurations(rows, (n, columns)), launch)
