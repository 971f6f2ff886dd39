"""Experts of a mixture: products of tokens with the weight of the expert that each is sent to, packed or dense.

One launch a projection. Where one or two tokens are computed with packed weights, each pair of a token and an expert is a matrix-vector
product by `matvec.py`'s program. Else pairs are sorted (`routing.py`), and a block of pairs of one expert is a product on tensor cores.
The grid has the most blocks that there may be, and programs past the last block return at once. Either way weights of experts that
no token is sent to are not read.

A block is `matmul.py`'s product, which rounds a weight with groups for more than 32 pairs; weights may be dense. Products in float32
are exact to its rounding, without tensor cores, in blocks of 16 pairs.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton import fused, tuning
from runtime.kernels.triton.codes import row_major
from runtime.kernels.triton.jit import cdiv, entry, next_power_of_2, tl
from runtime.kernels.triton.layout import DENSE, Stack
from runtime.kernels.triton.matmul import scales_sums, weight_times_rows
from runtime.kernels.triton.matvec import MAXIMUM_ROWS, vector_product
from runtime.kernels.triton.routing import Order, part_pairs, sort_pairs
from runtime.kernels.triton.tuning import Config

ROWS = (16, 32, 64, 128)  #: Places of a block.
_COLUMNS = 64  # of a dense weight, multiplied at once
_EXACT: list[tuple[int, int, int]] = [(64, 4, 3), (32, 4, 3)]  # of float32: without tensor cores, larger blocks spill


@entry
def experts_kernel(
    x, words, scale, zero, pairs, blocks, out,
    stride, N, K, tiles, groups,
    SHARED: tl.constexpr, GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr,
    ASYMMETRIC: tl.constexpr, SCALE_SUMS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, count = tl.program_id(0), tl.num_programs(0)
    expert = tl.load(blocks + block).to(tl.int64)
    if expert < 0:
        return
    first, end = tl.load(blocks + count + block), tl.load(blocks + 2 * count + block)
    place = first + tl.arange(0, BLOCK_M)
    # Past the end the last one again, which is not stored.
    pair = tl.load(pairs + tl.minimum(place, end - 1)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    owned = tl.minimum(n, N - 1)
    rows = x + (pair // SHARED)[:, None] * stride
    grids = expert * groups * N
    words += expert * N * (K if FIELD == 16 else tiles * 16)
    sums = weight_times_rows(
        rows, words, scale + grids, zero + grids, owned, 0, tiles, N, K, groups,
        GROUP, FIELD, CODES, RUN, ASYMMETRIC, SCALE_SUMS, EVEN_K, BLOCK_M, BLOCK_N, COLUMNS, STAGES,
    )  # fmt: skip
    target = out + pair[None, :] * N + n[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(place < end)[None, :] & (n < N)[:, None])


@entry
def experts_vector_kernel(
    x, words, scale, zero, chosen, out,
    stride, N, K, tiles, groups,
    SHARED: tl.constexpr, GROUP: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, RUN: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(2).to(tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64)
    grids = expert * groups * N
    vector_product(
        x + (pair // SHARED) * stride, words + expert * tiles * N * 16, scale + grids, zero + grids, x, out + pair * N,
        stride, 1, N, K, tiles, groups, GROUP, FIELD, CODES, RUN, ASYMMETRIC, False, EVEN_K, 1, BLOCK_N, TILES, 1,
    )  # fmt: skip


@entry
def combine_kernel(y, weights, out, N, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.cast(tl.program_id(0), tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        total += tl.load(weights + pair) * tl.load(y + pair * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


def combine(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sums of what the experts of each token gave, in the order of its choices: `[T * choices, N]`, float32 `[T, choices]` ->
    `[T, N]` in the dtype of `y`, summed in float32.
    """
    (tokens, choices), n = weights.shape, y.shape[1]
    out = torch.empty(tokens, n, dtype=y.dtype, device=y.device)
    if out.numel():
        block = min(1024, next_power_of_2(n))
        combine_kernel[(tokens, cdiv(n, block))](y, weights, out, n, CHOICES=choices, BLOCK=block, num_warps=4)
    return out


def block_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Places of a block: about the pairs that an expert has if all have as many; the fewest in float32."""
    if dtype == torch.float32:
        return ROWS[0]
    return next((size for size in ROWS if pairs <= size * experts), ROWS[-1])


def token_counts(experts: int, choices: int) -> list[int]:
    """Numbers of tokens that between them make every launch of `experts` in float16 or bfloat16: the first ones past each limit where
    others take over, two because what is compiled for one of them may assume that 16 divides its pairs.
    """
    limits = (0, MAXIMUM_ROWS * choices, part_pairs(experts), *(size * experts for size in ROWS[:-1]))
    return sorted({limit // choices + more for limit in limits for more in (1, 2)})


def configurations(rows: int, weight: Stack) -> list[Config]:
    """Launches on tensor cores worth trying for blocks of `rows`, the default first."""
    chosen = {16: [(64, 4, 4), (128, 4, 3), (64, 4, 3)], 32: [(64, 4, 3), (128, 4, 3), (128, 8, 3)],
              64: [(128, 8, 3), (128, 4, 3), (64, 4, 3)], 128: [(128, 8, 3), (128, 8, 2), (64, 4, 3)]}[rows]  # fmt: skip
    if weight.words.dtype == torch.float32:
        chosen = _EXACT
    columns = _COLUMNS if weight.field == DENSE else weight.tile
    return [
        {"BLOCK_M": rows, "BLOCK_N": n, "COLUMNS": columns, "num_warps": warps, "STAGES": stages}
        for n, warps, stages in chosen
    ]


def pair_configurations(weight: Stack) -> list[Config]:
    """Launches of matrix-vector products worth trying, the default first."""
    chosen = [(16, 4, 4), (8, 4, 4), (8, 4, 2), (16, 2, 4), (8, 8, 4)]
    return [{"BLOCK_N": n, "TILES": tiles, "num_warps": warps} for n, tiles, warps in chosen]


def products(x: torch.Tensor, weight: Stack, chosen: torch.Tensor, order: Order | None, shared: int) -> torch.Tensor:
    """`x W^T` of every pair: `[P / shared, K]` -> `[P, N]` in the dtype of `x`; sums in float32.

    Args:
        weight: of all experts; dense ones in the dtype of `x`.
        chosen: int32 `[T, choices]`, the expert of each pair.
        order: of the pairs; None: each is a matrix-vector product.
        shared: so many pairs in a row read the same row of `x`.
    """
    assert weight.global_scale is None, "experts with a global scale are not supported"
    x = row_major(x)
    count, (n, columns) = chosen.numel(), weight.shape
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    dense = weight.field == DENSE
    tiles, groups = (cdiv(columns, _COLUMNS), 0) if dense else (weight.words.shape[1], weight.scale.shape[1])

    def launch(config: Config) -> None:
        if order is None:
            experts_vector_kernel[(cdiv(n, 2 * config["BLOCK_N"]), 1, count)](
                x, *weight.operands, chosen, out, x.stride(0), n, columns, tiles, groups,
                SHARED=shared, **weight.constants, EVEN_K=columns % (config["TILES"] * weight.tile) == 0, **config,
            )  # fmt: skip
        else:
            # Blocks of one expert are neighbours on the axis that runs fastest: they read the same weight rows out of the L2 cache.
            experts_kernel[(order.blocks.shape[1], cdiv(n, config["BLOCK_N"]))](
                x, *weight.operands, order.pairs, order.blocks, out, x.stride(0), n, columns, tiles, groups,
                SHARED=shared, **weight.constants, SCALE_SUMS=scales_sums(order.rows, weight, x.dtype),
                EVEN_K=columns % config["COLUMNS"] == 0, **config,
            )  # fmt: skip

    if out.numel():
        candidates = pair_configurations(weight) if order is None else configurations(order.rows, weight)
        key = (*weight.key, weight.count, shared, tuning.row_class(count), 0 if order is None else order.rows)
        launch(tuning.choose("experts", key, x, candidates, launch))
    return out


def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack) -> torch.Tensor:
    """The weighted sum of `down(silu(gate(x)) * up(x))` of each token's experts: `[T, hidden]` -> the same.

    Args:
        chosen, weights: `[T, choices]`, of `routing.route`.
        gate_up: the gates' rows first, `(2 * inner, hidden)`.
        down: `(hidden, inner)`.
    """
    tokens, choices = chosen.shape
    if tokens == 0:
        return torch.empty_like(x)
    order = None
    if gate_up.field == DENSE or down.field == DENSE or tokens > MAXIMUM_ROWS:
        order = sort_pairs(chosen, gate_up.count, block_rows(chosen.numel(), gate_up.count, x.dtype))
    inner = fused.swiglu(products(x, gate_up, chosen, order, choices))
    return combine(products(inner, down, chosen, order, 1), weights)
