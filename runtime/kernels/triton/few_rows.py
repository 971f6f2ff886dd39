"""W4A16, W8A16 and block floats for 3 to 64 rows: split-K matrix product on tensor cores with dequantization in registers.

A slice of 16 neighbouring columns is one step (K = 16) of a tensor core instruction. The words of a tile are loaded once in the
layout of the instruction's second operand and stay in registers; slice by slice the codes become exact small numbers (minus
the zero point), so the product itself rounds nothing, and scales multiply the float32 sums once a group. `BLOCK_M` is 16 or 32
on purpose: from 64 on, Hopper's instruction would want the dequantized weight in shared memory, which costs more than the
product. After "Accelerating a Triton Fused Kernel for W4A16" (arXiv 2402.00025) and Marlin's layout idea.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import layout, tuning
from runtime.kernels.triton.codes import code_minus, load_scale, over_global_scale, store_part
from runtime.kernels.triton.jit import cdiv, entry, jit, tl
from runtime.kernels.triton.split_k import product, widest_split
from runtime.kernels.triton.tuning import Config

MAXIMUM_ROWS = 64


@jit
def few_rows_sums(
    rows, words, scale, zero, owned, first, last, N, K, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, FLOAT: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products `[BLOCK_M, BLOCK_N]` of the rows at the pointers `rows` `[BLOCK_M, 1]` with rows `owned` of a weight, over some tiles."""
    FIELDS: tl.constexpr = 32 // FIELD
    word = tl.arange(0, 16)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for t in tl.range(first, last, num_stages=STAGES):
        base = words + tl.cast(t, tl.int64) * N * 16
        w = tl.load(base + owned[None, :] * 16 + word[:, None], eviction_policy="evict_first")  # [16, BLOCK_N]
        for run in tl.static_range(FIELDS // RUN):
            if GROUP == 0:
                group = 0
            else:
                group = tl.minimum((t * (FIELDS * 16) + run * RUN * 16) // GROUP, groups - 1)
            at = tl.cast(group, tl.int64) * N + owned
            if ASYMMETRIC:
                z = tl.load(zero + at).to(tl.float32)[None, :]
            else:
                z = 0.0
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for i in tl.static_range(RUN):
                k = t * (FIELDS * 16) + (run * RUN + i) * 16 + word[None, :]
                if EVEN_K:
                    a = tl.load(rows + k)
                else:
                    a = tl.load(rows + k, mask=k < K, other=0.0)
                # Exact in 8 bits of mantissa. The bits of 1.0 are a constant here: an argument would keep the compiler from
                # loading the words in the operand's layout, which saves more (shuffles) than it costs (one LOP3).
                b = code_minus(w, 0x3F800000, z, run * RUN + i, FIELD, FLOAT).to(rows.dtype.element_ty)
                part = tl.dot(a, b, part)
            sums += part * load_scale(scale + at)[None, :]
    return sums


@entry
def few_rows_kernel(
    x, words, scale, zero, bias, out,
    stride, M, N, K, tiles, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, FLOAT: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    owned = tl.minimum(n, N - 1)  # as in matvec.py: repeated and not stored, for rows of x and of the weight
    rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride
    share = tl.cdiv(tiles, SPLIT_K)
    first = tl.program_id(1) * share
    sums = few_rows_sums(
        rows, words, scale, zero, owned, first, tl.minimum(first + share, tiles), N, K, groups,
        GROUP, FIELD, FLOAT, RUN, ASYMMETRIC, EVEN_K, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    sums = over_global_scale(sums, scale, zero)
    if HAS_BIAS:
        sums += tl.load(bias + owned).to(tl.float32)[None, :]
    store_part(out, sums, m, n, M, N)


def configurations(rows: int, weight: layout.Weight) -> list[Config]:
    """Launches worth trying, the default first."""
    tiles = weight.words.shape[0]
    m = 16 if rows <= 16 else 32
    split = widest_split(weight.shape[0] // 64, 256, tiles // 8)
    chosen = [(128, 2 * split, 4, 3), (64, split, 4, 4), (64, 2 * split, 4, 3), (64, split, 4, 3), (128, split, 8, 3),
              (32, split, 2, 4), (64, split, 2, 3), (64, max(1, split // 2), 4, 4)]  # fmt: skip
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "SPLIT_K": s, "num_warps": w, "STAGES": g} for n, s, w, g in chosen if s <= tiles
    ] or [{"BLOCK_M": m, "BLOCK_N": 64, "SPLIT_K": 1, "num_warps": 4, "STAGES": 3}]


def few_rows(x: torch.Tensor, weight: layout.Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias` for `x` `[M, K]` float16 or bfloat16 -> `[M, N]` in the dtype of `x`; sums in float32.

    Right for any number of rows, fast up to `MAXIMUM_ROWS`.
    """
    rows = x.shape[0]

    def grid(config: Config) -> tuple[int, ...]:
        return cdiv(weight.shape[0], config["BLOCK_N"]), config["SPLIT_K"], cdiv(rows, config["BLOCK_M"])

    candidates = configurations(rows, weight)
    return product(few_rows_kernel, x, weight, bias, candidates, grid, key=tuning.row_class(rows))
