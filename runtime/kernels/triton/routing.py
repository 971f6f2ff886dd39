"""Routing of tokens to experts: the chosen experts of each token and their weights, and the tokens of a step in the order of experts.

Nothing is read back: launches and sizes follow from the numbers of tokens, experts and choices alone, so all of it can be captured in a
CUDA graph. No atomics: the order, and with it every sum that follows it, is the same each time.

A *pair* is a token and one of its choices, number `token * choices + choice`. Pairs of one expert, in their order, are cut into blocks of
at most so many rows (vLLM's fused_moe pads them to that size; here the last block of an expert has fewer).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.triton.codes import row_major
from runtime.kernels.triton.jit import cdiv, entry, jit, next_power_of_2, tl

_TABLE = 8192  # numbers of a program's table of pairs and experts


@entry
def route_kernel(
    logits, chosen, weights, stride, E, factor,
    CHOICES: tl.constexpr, OF_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row, at, slot = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    low = float("-inf")
    score = tl.load(logits + row * stride + at, mask=at < E, other=low).to(tl.float32)
    # NaN counts as the lowest: whatever the logits are, so many different experts that exist are chosen.
    key = tl.where(score == score, score, low)
    free = at < E
    places, best = tl.zeros([SLOTS], tl.int32), tl.full([SLOTS], low, tl.float32)
    for i in range(CHOICES):
        top = tl.max(tl.where(free, key, low), 0)
        place = tl.min(tl.where(free & (key == top), at, BLOCK), 0)  # of equal ones the first
        places, best = tl.where(slot == i, place, places), tl.where(slot == i, top, best)
        free = free & (at != place)
    highest = tl.max(key, 0)
    powers = tl.exp(best - highest)
    if OF_CHOSEN:
        total = tl.sum(powers, 0)
    else:
        total = tl.sum(tl.exp(key - highest), 0)
    total += tl.sum(tl.where(score == score, 0.0, score), 0)  # NaN stays NaN
    tl.store(chosen + row * CHOICES + slot, places, mask=slot < CHOICES)
    tl.store(weights + row * CHOICES + slot, powers / total * factor, mask=slot < CHOICES)


def route(
    logits: torch.Tensor, choices: int, of_chosen: bool, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of the highest logits, and their shares of a softmax: `[T, E]` -> int32 and float32 `[T, choices]`, highest first.

    Of equal logits the first ones are chosen.

    Args:
        of_chosen: the softmax is over the chosen ones; else over all.
        factor: of the weights.
    """
    logits = row_major(logits)
    rows, count = logits.shape
    chosen = torch.empty(rows, choices, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, choices, dtype=torch.float32, device=logits.device)
    if rows:
        block = next_power_of_2(count)
        route_kernel[(rows,)](
            logits, chosen, weights, logits.stride(0), count, factor,
            CHOICES=choices, OF_CHOSEN=of_chosen, BLOCK=block, SLOTS=next_power_of_2(choices),
            num_warps=max(1, min(4, block // 64)),
        )  # fmt: skip
    return chosen, weights


@jit
def _hits(chosen, part, P, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """Which expert each pair of a part has, `[PAIRS, EXPERTS]` int32 of 0 and 1; pairs past the end have none."""
    at = part * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(chosen + at, mask=at < P, other=EXPERTS)
    return (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@entry
def count_kernel(chosen, counts, P, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    hits = _hits(chosen, tl.program_id(0), P, PAIRS, EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.sum(hits, 0))


@entry
def order_kernel(
    chosen, counts, order, blocks, P, E,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    part, own = tl.program_id(0), tl.arange(0, EXPERTS)
    parts, used = tl.cdiv(P, PAIRS), tl.minimum(P, E)
    # `most_blocks`, computed here: as an argument Triton would specialize on whether 16 divides it.
    count = used + (P - used) // ROWS
    hits = _hits(chosen, part, P, PAIRS, EXPERTS)
    if ALONE:  # one part: nothing was counted
        total = tl.sum(hits, 0)
        before = total * 0
    else:
        total, before = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
        for first in range(0, parts, TOGETHER):
            other = first + tl.arange(0, TOGETHER)
            found = tl.load(counts + other[:, None] * EXPERTS + own[None, :], mask=(other < parts)[:, None], other=0)
            total += tl.sum(found, 0)
            before += tl.sum(tl.where((other < part)[:, None], found, 0), 0)
    start = tl.cumsum(total, 0) - total
    # A pair's place: after the experts before its own, the parts before this one, and the pairs before it.
    places = tl.cumsum(hits, 0) - 1 + (start + before)[None, :]
    at = part * PAIRS + tl.arange(0, PAIRS)
    tl.store(order + tl.sum(hits * places, 1), at, mask=at < P)
    # The table of blocks. Programs share the blocks of each expert; entries past the last block are -1.
    cut = (total + ROWS - 1) // ROWS
    ends = tl.cumsum(cut, 0)
    for i in range(part, tl.max(cut, 0), tl.num_programs(0)):
        block, begin = ends - cut + i, start + i * ROWS
        tl.store(blocks + block, own, mask=i < cut)
        tl.store(blocks + count + block, begin, mask=i < cut)
        tl.store(blocks + 2 * count + block, tl.minimum(begin + ROWS, start + total), mask=i < cut)
    tl.store(blocks + at, -1, mask=(at >= tl.max(ends, 0)) & (at < count))


@dataclass(frozen=True)
class Order:
    """Pairs sorted by expert, and the blocks that they are cut into.

    Attributes:
        pairs: int32 `[P]`.
        blocks: int32 `[3, most blocks]`: expert of each block (-1: there is no such block), and its first place and end in `pairs`.
        rows: most places of a block.
    """

    pairs: torch.Tensor
    blocks: torch.Tensor
    rows: int


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """The most blocks that so many pairs can make: every expert that could have a pair has one, and the others fill blocks."""
    used = min(pairs, experts)
    return used + (pairs - used) // rows


def part_pairs(experts: int) -> int:
    """Pairs that one program puts in order."""
    return max(16, min(64, _TABLE // next_power_of_2(experts)))


def sort_pairs(chosen: torch.Tensor, experts: int, rows: int) -> Order:
    """The order of pairs whose experts are `chosen`, int32 `[T, choices]` in `[0, experts)`, T > 0, in blocks of `rows`."""
    count, device = chosen.numel(), chosen.device
    padded, size = max(2, next_power_of_2(experts)), part_pairs(experts)
    parts, most = cdiv(count, size), most_blocks(count, experts, rows)
    pairs = torch.empty(count, dtype=torch.int32, device=device)
    blocks = torch.empty(3, most, dtype=torch.int32, device=device)
    counts, alone = pairs, parts == 1
    if not alone:
        counts = torch.empty(parts, padded, dtype=torch.int32, device=device)
        count_kernel[(parts,)](chosen, counts, count, PAIRS=size, EXPERTS=padded, num_warps=4)
    order_kernel[(max(parts, cdiv(most, size)),)](
        chosen, counts, pairs, blocks, count, experts,
        PAIRS=size, EXPERTS=padded, ROWS=rows, TOGETHER=max(2, min(16, _TABLE // padded)), ALONE=alone, num_warps=8,
    )  # fmt: skip
    return Order(pairs, blocks, rows)
