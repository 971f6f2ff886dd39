"""W4A16, W8A16 and block floats for 3 rows and more: a matrix product on tensor cores, and dequantization alone.

The weight is the left operand, `W x^T`: its rows, of which there are always enough, fill the 64 or 128 that tensor cores of Hopper and
Blackwell want, and rows of x their other side, which may be narrow. Words of a tile are loaded in the layout of that operand and
become floats in the registers that Ampere and Hopper multiply from (`codes.code_slice`). Of the weight, only codes pass through
shared memory. Marlin (arXiv 2408.11743) does so with another layout.

Codes minus their zero point, and entries of a table, are exact. Scales of channels multiply the sums at the end, and those of groups,
in blocks of up to 32 rows, the sums of each group. In larger blocks that would take more instructions and registers, so the weight is
rounded to the dtype of x, as the reference rounds it; k-quants, but for IQ4_NL, are in any block. Block floats are scaled before the
product in any block, where that changes nothing: NVFP4, and others in bfloat16 (apart from scales at the ends of its range).

`dense` dequantizes the whole weight into a scratch matrix (read 0.5, write 2 bytes a weight) that cuBLAS multiplies; `sparse` compresses
that of a 2:4 weight for sparse tensor cores (`semi_structured.py`). Which wins with many rows depends on the device, so tuning chooses
among them; untuned, dense takes over at 1024 rows.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import gpu, layout, semi_structured, tuning
from runtime.kernels.triton.codes import (
    dequantize_groups,
    dequantize_slice,
    dequantize_slices,
    load_grid,
    over_global_scale,
    own_block,
    row_major,
    store_part,
)
from runtime.kernels.triton.jit import cdiv, entry, jit, tl
from runtime.kernels.triton.split_k import product, widest_split
from runtime.kernels.triton.tables import load_table
from runtime.kernels.triton.tuning import Config

SCRATCH_ROWS = 1024  #: Untuned, from so many rows on the whole weight is dequantized.


@jit
def weight_times_rows(
    rows, words, scale, zero, owned, first, last, N, K, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    SCALE_SUMS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Products `[BLOCK_N, BLOCK_M]` of rows `owned` of a weight, packed or dense (field 16), and those that `rows` `[BLOCK_M, 1]` point at.

    The columns are those of tiles `first` to `last`, of `COLUMNS` each.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    CHANNELS: tl.constexpr = FIELD != 16 and GROUP == 0  # scales multiply the sums of all columns
    GROUPS: tl.constexpr = 1 if FIELD == 16 else COLUMNS // (RUN * 16)  # of a tile
    # Scales of a weight that is rounded stay: ones that go through the loop would send the floats through shared memory.
    AHEAD: tl.constexpr = SCALE_SUMS and GROUPS == 1
    PARTS: tl.constexpr = GROUPS if SCALE_SUMS else 1  # products of a tile
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    table = load_table(zero, owned[:, None], N, CODES)
    if AHEAD or CHANNELS:
        s, z = load_grid(scale, zero, owned, first * COLUMNS, N, groups, GROUP, ASYMMETRIC)
    for t in tl.range(first, last, num_stages=STAGES):
        if FIELD != 16:
            codes = tl.load(words + tl.cast(t, tl.int64) * N * 16 + owned[:, None] * 16 + tl.arange(0, 16)[None, :])
        if AHEAD and not CHANNELS:  # the compiler copies nothing ahead that is less than 4 bytes a thread
            next_s, next_z = load_grid(scale, zero, owned, (t + 1) * COLUMNS, N, groups, GROUP, ASYMMETRIC)
        for part in tl.static_range(PARTS):
            k = t * COLUMNS + part * (COLUMNS // PARTS) + tl.arange(0, COLUMNS // PARTS)[None, :]
            a = tl.load(rows + k) if EVEN_K else tl.load(rows + k, mask=k < K, other=0.0)
            if FIELD == 16:
                dense = words + owned.to(tl.int64)[:, None] * K + k
                w = tl.load(dense) if EVEN_K else tl.load(dense, mask=k < K, other=0.0)
            elif CHANNELS:
                w = dequantize_slices(codes, s, z, table, 0, RUN, FIELD, CODES, None, dtype)
            elif SCALE_SUMS:
                if not AHEAD:
                    s, z = load_grid(scale, zero, owned, t * COLUMNS + part * (RUN * 16), N, groups, GROUP, ASYMMETRIC)
                w = dequantize_slices(codes, s, z, table, part * RUN, RUN, FIELD, CODES, None, dtype)
            else:
                w = dequantize_groups(
                    codes, scale, zero, table, owned, t * COLUMNS, N, groups, 0, GROUPS, GROUP, FIELD, CODES, RUN, ASYMMETRIC, dtype
                )  # fmt: skip
            if SCALE_SUMS and not CHANNELS:
                sums += tl.dot(w, tl.trans(a), input_precision="ieee") * s[:, None]
            else:
                sums = tl.dot(w, tl.trans(a), sums, input_precision="ieee")
        if AHEAD and not CHANNELS:
            s, z = next_s, next_z
    if CHANNELS:
        sums *= s[:, None]
    return sums


@entry
def matmul_kernel(
    x, words, scale, zero, bias, out,
    stride, M, N, K, tiles, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALE_SUMS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m, n = own_block(M, N, BLOCK_M, BLOCK_N)
    owned = tl.minimum(n, N - 1)  # past the end the last one again, which is not stored; so of rows of x
    rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride
    share = tl.cdiv(tiles, SPLIT_K)
    first = tl.program_id(1) * share
    sums = weight_times_rows(
        rows, words, scale, zero, owned, first, tl.minimum(first + share, tiles), N, K, groups,
        GROUP, FIELD, CODES, RUN, ASYMMETRIC, SCALE_SUMS, EVEN_K, BLOCK_M, BLOCK_N, 512 // FIELD, STAGES,
    )  # fmt: skip
    sums = over_global_scale(sums, scale, zero)
    if HAS_BIAS:
        sums += tl.load(bias + owned).to(tl.float32)[:, None]
    store_part(out, tl.trans(sums), m, n, M, N)


@entry
def dequantize_kernel(
    words, scale, zero, out, N, K, groups,
    GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr, ASYMMETRIC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    owned, word = tl.minimum(n, N - 1), tl.arange(0, 16)
    w = tl.load(words + tl.cast(t, tl.int64) * N * 16 + owned[:, None] * 16 + word[None, :])
    rows = out + n.to(tl.int64)[:, None] * K
    kind: tl.constexpr = scale.dtype.element_ty
    table = load_table(zero, owned[:, None], N, CODES)
    for j in tl.static_range(32 // FIELD):
        k = t * (512 // FIELD) + j * 16 + word[None, :]
        s, z = load_grid(scale, zero, owned, t * (512 // FIELD) + j * 16, N, groups, GROUP, ASYMMETRIC)
        if kind == tl.int8:
            dense = dequantize_slice(
                w, over_global_scale(s, scale, zero), z, table, j, FIELD, CODES, tl.float32, out.dtype.element_ty
            )
        else:
            dense = dequantize_slice(w, s, z, table, j, FIELD, CODES, kind, out.dtype.element_ty)
        tl.store(rows + k, dense, mask=(n < N)[:, None] & (k < K))


def dequantize(weight: layout.Weight, dtype: torch.dtype) -> torch.Tensor:
    """`[N, K]` in `dtype`: `(code - zero) * scale` or `code * scale - minimum`, one rounding; e4m3 scales are divided first, in float32."""
    n, columns = weight.shape
    out = torch.empty(n, columns, dtype=dtype, device=weight.words.device)
    if out.numel():
        dequantize_kernel[(cdiv(n, 64), weight.words.shape[0])](
            *weight.operands, out, n, columns, weight.groups, **weight.constants, BLOCK_N=64, num_warps=4
        )  # fmt: skip
    return out


def scales_sums(block_rows: int, weight: layout.Weight, dtype: torch.dtype) -> bool:
    """Whether scales multiply the sums of each group for blocks of so many rows of x, rather than the weight, which is then rounded to
    `dtype`: where the rounding would change something, and the rows are few.
    """
    if weight.products:
        return False  # minima would multiply sums of x, and scales, several loads each, come in small groups
    unchanged = weight.codes == "float" and (weight.scale.dtype == torch.int8 or dtype == torch.bfloat16)
    return weight.field != layout.DENSE and block_rows <= 32 and not unchanged


def configurations(rows: int, weight: layout.Weight, dtype: torch.dtype = torch.bfloat16) -> list[Config]:
    """Launches worth trying, the default first; `{"dense": True}` dequantizes into a scratch matrix for cuBLAS, `{"sparse": True}`
    into one for sparse tensor cores.
    """
    tiles, device = weight.words.shape[0], weight.words.device
    # Parts are written and read: 8 of 64 rows in float32 are 4096 bytes a row of the weight, which has 2048 if its columns are 4096.
    split = widest_split(cdiv(weight.shape[0], 128), 256 if rows <= 16 else 128, tiles // 8)
    major = gpu.capability(device)[0]
    # With 4, ptxas waits for each wgmma where sums go on through the loop and end as float32 parts (C7515), and what is looked up in a
    # table goes through shared memory.
    warps = 8 if major == 9 and (weight.codes == "table" or not scales_sums(rows, weight, dtype)) else 4
    if rows <= 64:
        m = next(size for size in (16, 32, 64) if rows <= size)
        chosen = [(m, 128, split, warps, 4), (m, 128, 2 * split, warps, 4), (m, 128, split, warps, 3), (m, 64, split, 4, 4),
                  (m, 128, split, 8 if warps == 4 else 4, 4), (m, 128, max(1, split // 2), warps, 4), (m, 64, 2 * split, 4, 3)]  # fmt: skip
    elif major not in (9, 10):  # both operands and the sums in registers: larger blocks spill
        chosen = [(64, 128, 1, 4, 3), (64, 128, 2, 4, 3), (64, 64, 1, 4, 3), (64, 128, 1, 8, 3)]
        if weight.products:  # and their scales: four warps would spill too
            chosen = [(64, 128, 1, 8, 3), (64, 64, 1, 4, 3)]
    else:
        chosen = [
            (128, 128, 1, warps, 3),
            (256, 128, 1, 8, 2),
            (128, 128, 1, 8, 2),
            (64, 128, 1, 4, 3),
            (128, 64, 1, 4, 3),
        ]
        if rows <= 256:
            chosen = [(128, 128, 2, warps, 3), *chosen]
    names = ("BLOCK_M", "BLOCK_N", "SPLIT_K", "num_warps", "STAGES")
    fused: list[Config] = [
        dict(zip(names, each, strict=True)) for each in dict.fromkeys(chosen) if each[2] <= max(tiles, 1)
    ]
    if rows <= 64:
        return fused
    scratch = [{"dense": True}]
    if weight.two_of_four and semi_structured.worth_timing(rows, weight.shape, dtype, device):
        scratch.append({"sparse": True})
    return [*scratch, *fused] if rows >= SCRATCH_ROWS else [*fused, *scratch]


def matmul(x: torch.Tensor, weight: layout.Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias` for `x` `[M, K]` float16 or bfloat16 -> `[M, N]` in the dtype of `x`; sums in float32.

    Right for any number of rows. With more than 32, a weight with groups is rounded to the dtype of `x` first, one whose scales are
    products always, and any is that a scratch matrix is written for. One with e4m3 scales is exact in it otherwise, and sums are
    divided by the global scale.
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
        scaled = scales_sums(config["BLOCK_M"], weight, x.dtype)
        return product(matmul_kernel, x, weight, bias, [config], grid, key=rows, SCALE_SUMS=scaled)

    candidates = configurations(rows, weight, x.dtype)
    # Where sparse tensor cores are a candidate it is another choice.
    among = ("2:4",) if {"sparse": True} in candidates else ()
    key = (*weight.key, tuning.row_class(rows), *among)
    return launch(tuning.choose("matmul", key, x, candidates, launch))
