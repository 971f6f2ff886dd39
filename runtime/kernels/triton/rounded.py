"""Weights of 2 to 4 bits times inputs that are rounded to integers or float8, with a scale a token or a group: 8-bit tensor cores.

Columns that share both scales make a unit, of at most a tile. Of integers its sum of products is exact; units are added in float32, in
order. float8 (compute capability 8.9) holds codes of weights exactly, less their zero point too. The reference rounds inputs back to
their dtype before it multiplies; here nothing does.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import layout, tuning
from runtime.kernels.triton.codes import beside, own_block, store_part
from runtime.kernels.triton.jit import cdiv, entry, jit, tl
from runtime.kernels.triton.split_k import split_k, widest_split
from runtime.kernels.triton.tuning import Config

UNITS = (128, 64, 32)
"""Columns that one integer product takes: a tile, or the largest part of it that divides the groups of both sides."""


@jit
def signed_slice(w, offset, j: tl.constexpr, dtype: tl.constexpr):
    """Columns `16 j .. 16 j + 15` of a tile of 4-bit fields, less an offset of each row: `[rows, 16]`."""
    code = ((w >> (4 * j)) & 15) - offset
    if dtype == tl.int8:
        return code.to(tl.int8)
    else:
        return code.to(tl.float32).to(dtype)


@jit
def signed_slices(w, offset, first: tl.constexpr, COUNT: tl.constexpr, dtype: tl.constexpr):
    """`COUNT` slices from `first` on, a power of two of them, side by side: words `[rows, 16]` -> `[rows, 16 COUNT]`."""
    if COUNT == 1:
        return signed_slice(w, offset, first, dtype)
    else:
        half: tl.constexpr = COUNT // 2
        return beside(signed_slices(w, offset, first, half, dtype), signed_slices(w, offset, first + half, half, dtype))


@entry
def rounded_kernel(
    x, words, scale, zero, x_scale, bias, out,
    M, N, K, tiles, groups, x_groups,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, UNIT: tl.constexpr, ASYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m, n = own_block(M, N, BLOCK_M, BLOCK_N)
    row, owned, word = tl.minimum(m, M - 1).to(tl.int64), tl.minimum(n, N - 1), tl.arange(0, 16)
    rows, row_scale = x + row[:, None] * K, x_scale + row * x_groups
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    share = tl.cdiv(tiles, SPLIT_K)
    first = tl.program_id(1) * share
    for t in tl.range(first, tl.minimum(first + share, tiles), num_stages=STAGES):
        w = tl.load(words + tl.cast(t, tl.int64) * N * 16 + owned[:, None] * 16 + word[None, :])
        for unit in tl.static_range(128 // UNIT):
            column = t * 128 + unit * UNIT
            k = column + tl.arange(0, UNIT)[None, :]
            if EVEN_K:
                a = tl.load(rows + k)
            else:
                a = tl.load(rows + k, mask=k < K, other=0.0)
            at, x_at = owned, row_scale
            if GROUP != 0:
                at = owned + tl.cast(tl.minimum(column // GROUP, groups - 1), tl.int64) * N
            if X_GROUP != 0:
                x_at = row_scale + tl.minimum(column // X_GROUP, x_groups - 1)
            offset = 8
            if ASYMMETRIC:
                offset = 8 + tl.load(zero + at).to(tl.int32)[:, None]
            b = tl.trans(signed_slices(w, offset, unit * UNIT // 16, UNIT // 16, a.dtype))
            if a.dtype == tl.int8:
                part = tl.dot(a, b, out_dtype=tl.int32)
            else:
                part = tl.dot(a, b, max_num_imprecise_acc=UNIT)
            factor = tl.load(x_at)[:, None] * tl.load(scale + at).to(tl.float32)[None, :]
            sums += part.to(tl.float32) * factor
    if HAS_BIAS:
        sums += tl.load(bias + owned).to(tl.float32)[None, :]
    store_part(out, sums, m, n, M, N)


def configurations(rows: int, weight: layout.Weight) -> list[Config]:
    """Launches worth trying, the default first."""
    tiles = weight.words.shape[0]
    if rows <= 64:
        m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        split = widest_split(weight.shape[0] // 64, 256, tiles // 4)
        chosen = [(m, 64, split, 4, 3), (m, 128, split, 4, 3), (m, 64, 2 * split, 4, 3), (m, 32, split, 4, 4)]
    elif rows <= 512:
        chosen = [(64, 64, 1, 4, 3), (64, 128, 1, 8, 3), (128, 64, 1, 4, 3), (64, 64, 2, 4, 3)]
    else:
        chosen = [(128, 64, 1, 8, 3), (128, 64, 1, 4, 3), (64, 128, 1, 4, 3), (128, 128, 1, 8, 3)]
    names = ("BLOCK_M", "BLOCK_N", "SPLIT_K", "num_warps", "STAGES")
    return [dict(zip(names, each, strict=True)) for each in chosen if each[2] <= tiles]


def product(
    codes: torch.Tensor, scale: torch.Tensor, weight: layout.Weight, x_group: int, dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scaled product of codes: int8 or float8 `[M, K]` with scales float32 `[M, groups]`, times a weight of 4-bit fields -> `[M, N]` in
    `dtype`.

    Args:
        x_group: columns of the inputs that share a scale; 0: all do. Groups of both sides are multiples of 32.
    """
    (rows, columns), n = codes.shape, weight.shape[0]
    unit = next(size for size in UNITS if weight.group % size == 0 and x_group % size == 0)

    def launch(config: Config, target: torch.Tensor, bias: torch.Tensor | None) -> None:
        blocks = cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
        rounded_kernel[(blocks, config["SPLIT_K"])](
            codes, *weight.operands, scale, scale if bias is None else bias, target,
            rows, n, columns, weight.words.shape[0], weight.scale.shape[0], scale.shape[1],
            GROUP=weight.group, X_GROUP=x_group, UNIT=unit, ASYMMETRIC=weight.zero is not None, HAS_BIAS=bias is not None,
            EVEN_K=columns % weight.tile == 0, **config,
        )  # fmt: skip

    key = (str(codes.dtype).removeprefix("torch."), *weight.key, x_group, tuning.row_class(rows))
    out = torch.empty(rows, n, dtype=dtype, device=codes.device)
    return split_k("rounded", key, codes, out, bias, configurations(rows, weight), launch)
