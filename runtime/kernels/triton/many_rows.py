"""W4A16, W8A16 and block floats for many rows: a matrix product that dequantizes on the way, and dequantization alone.

`fused`: each program dequantizes the tile it multiplies; the weight is rounded to the activations' dtype, as the reference
rounds it, and goes to the tensor cores through shared memory. `dense`: the whole weight is dequantized into a scratch matrix
(read 0.5, write 2 bytes a weight, some 10 % of the product's time at 2048 rows) and cuBLAS multiplies. `sparse`: the scratch
matrix of a 2:4 weight is compressed for sparse tensor cores (`semi_structured.py`). Which one wins depends on the device and the
rows, so tuning chooses among them; untuned it is fused below 1024 rows, dense from there.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import gpu, layout, semi_structured, tuning
from runtime.kernels.triton.codes import (
    ONE,
    dequantize_slice,
    dequantize_tile,
    over_global_scale,
    own_block,
    row_major,
    store_part,
)
from runtime.kernels.triton.jit import cdiv, entry, tl
from runtime.kernels.triton.split_k import product
from runtime.kernels.triton.tuning import Config


@entry
def many_rows_kernel(
    x, words, scale, zero, bias, out,
    stride, M, N, K, tiles, groups, one,
    GROUP: tl.constexpr, FIELD: tl.constexpr, FLOAT: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    m, n = own_block(M, N, BLOCK_M, BLOCK_N)
    owned = tl.minimum(n, N - 1)  # rows past the end repeat the last one and are not stored
    word, column = tl.arange(0, 16), tl.arange(0, 512 // FIELD)
    rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    share = tl.cdiv(tiles, SPLIT_K)
    first = tl.program_id(1) * share
    for t in tl.range(first, tl.minimum(first + share, tiles), num_stages=STAGES):
        w = tl.load(words + tl.cast(t, tl.int64) * N * 16 + owned[:, None] * 16 + word[None, :])
        b = dequantize_tile(
            w, one, scale, zero, owned, t, N, groups, BLOCK_N, GROUP, FIELD, FLOAT, RUN, ASYMMETRIC, x.dtype.element_ty
        )
        k = t * (512 // FIELD) + column[None, :]
        if EVEN_K:
            a = tl.load(rows + k)
        else:
            a = tl.load(rows + k, mask=k < K, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums)
    sums = over_global_scale(sums, scale, zero)
    if HAS_BIAS:
        sums += tl.load(bias + owned).to(tl.float32)[None, :]
    store_part(out, sums, m, n, M, N)


@entry
def dequantize_kernel(
    words, scale, zero, out, N, K, groups, one,
    GROUP: tl.constexpr, FIELD: tl.constexpr, FLOAT: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    owned, word = tl.minimum(n, N - 1), tl.arange(0, 16)
    w = tl.load(words + tl.cast(t, tl.int64) * N * 16 + owned[:, None] * 16 + word[None, :])
    rows = out + n.to(tl.int64)[:, None] * K
    for j in tl.static_range(32 // FIELD):
        k = t * (512 // FIELD) + j * 16 + word[None, :]
        dense = dequantize_slice(
            w, one, scale, zero, owned, t, N, groups, j, GROUP, FIELD, FLOAT, RUN, ASYMMETRIC, out.dtype.element_ty, True
        )  # fmt: skip
        tl.store(rows + k, dense, mask=(n < N)[:, None] & (k < K))


def dequantize(weight: layout.Weight, dtype: torch.dtype) -> torch.Tensor:
    """`[N, K]` in `dtype`: `(code - zero) * scale`, one rounding; e4m3 scales are divided first, in float32."""
    n, columns = weight.shape
    out = torch.empty(n, columns, dtype=dtype, device=weight.words.device)
    if out.numel():
        dequantize_kernel[(cdiv(n, 64), weight.words.shape[0])](
            *weight.operands, out, n, columns, weight.scale.shape[0], ONE, **weight.constants, BLOCK_N=64, num_warps=4
        )  # fmt: skip
    return out


def configurations(rows: int, weight: layout.Weight, dtype: torch.dtype = torch.bfloat16) -> list[Config]:
    """Launches worth trying, the default first; `{"dense": True}` dequantizes into a scratch matrix for cuBLAS, `{"sparse": True}`
    into one for sparse tensor cores.
    """
    tiles, scratch = weight.words.shape[0], [{"dense": True}]
    if weight.two_of_four and semi_structured.worth_timing(rows, weight.shape, dtype, weight.words.device):
        scratch.append({"sparse": True})
    narrow = gpu.capability(weight.words.device) < (9, 0)  # both operands in registers: large blocks spill
    if rows <= 64:
        chosen = [(64, 64, 4, 4, 3), (64, 64, 2, 4, 3), (64, 128, 4, 4, 3), (64, 128, 2, 8, 3)]
    elif rows <= 256:
        chosen = [(64, 128, 2, 4, 3), (128, 64, 2, 4, 3), (128, 128, 1, 8, 3), (128, 128, 2, 8, 3), (64, 128, 1, 4, 3)]
    else:
        chosen = [
            (128, 128, 1, 8, 3),
            (128, 256, 1, 8, 2),
            (256, 64, 1, 8, 2),
            (256, 128, 1, 8, 2),
            (128, 128, 1, 4, 3),
        ]
    if narrow and rows > 64:
        chosen = [(128, 64, 1, 8, 3), (64, 64, 1, 4, 3), (64, 128, 1, 4, 3), (64, 64, 2, 4, 3), (128, 128, 1, 8, 2)]
    names = ("BLOCK_M", "BLOCK_N", "SPLIT_K", "num_warps", "STAGES")
    fused: list[Config] = [dict(zip(names, each, strict=True)) for each in chosen if each[2] <= tiles]
    return [*scratch, *fused] if rows >= 1024 or not fused else [*fused, *scratch]


def many_rows(x: torch.Tensor, weight: layout.Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias` for `x` `[M, K]` float16 or bfloat16 -> `[M, N]` in the dtype of `x`; sums in float32.

    Right for any number of rows. The weight is rounded to the dtype of `x` first. One with e4m3 scales is exact in it, unless a scratch
    matrix is written, and sums are divided by the global scale.
    """
    x = row_major(x)
    rows, n = x.shape[0], weight.shape[0]
    if rows == 0 or n == 0:
        return torch.empty(rows, n, dtype=x.dtype, device=x.device)

    def grid(config: Config) -> tuple[int, ...]:
        return cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]), config["SPLIT_K"]

    def launch(config: Config) -> torch.Tensor:
        if config.get("dense"):
            return torch.nn.functional.linear(x, dequantize(weight, x.dtype), bias)
        if config.get("sparse"):
            return semi_structured.linear(x, dequantize(weight, x.dtype), bias)
        return product(many_rows_kernel, x, weight, bias, [config], grid, key=rows, one=ONE)

    candidates = configurations(rows, weight, x.dtype)
    # Where sparse tensor cores are a candidate it is another choice.
    among = ("2:4",) if {"sparse": True} in candidates else ()
    key = (*weight.key, tuning.row_class(rows), *among)
    return launch(tuning.choose("many_rows", key, x, candidates, launch))
