"""Chunks of prompts of hostile shapes over pages, with their attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.engines.cuda.cache import CacheLayer, Chunks

LIMIT = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, window: int) -> torch.Tensor:
    """Causal attention of one chunk, `[tokens, heads, head_dim]` in float64."""
    position, place = start + torch.arange(len(q))[:, None], torch.arange(len(k))
    seen = (place <= position) & ((place > position - window) if window else True)
    keys, values = (each.double().repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


class Made(NamedTuple):
    """What attention is called with, and `wanted`, in float64."""

    q: torch.Tensor
    layer: CacheLayer
    chunks: Chunks
    scale: float
    wanted: torch.Tensor


@dataclass(frozen=True)
class ChunkCase:
    """Chunks of a step, as (start, tokens); `sizes`: heads of queries, of keys, and their channels."""

    dtype: torch.dtype
    sizes: tuple[int, int, int]
    page: int
    spans: tuple[tuple[int, int], ...]
    window: int = 0

    @property
    def limit(self) -> float:
        """Of rounding, relative and absolute."""
        return LIMIT[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {self.sizes} pages of {self.page}, {self.spans}, window {self.window}"

    def make(self) -> Made:
        """Random ones; wherever no token of theirs lies, or none that a chunk sees, the cache holds NaN."""
        generator = torch.Generator().manual_seed(len(str(self)))

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        (heads, kv_heads, size), page = self.sizes, self.page
        starts, counts = zip(*self.spans, strict=True)
        widths = [-(-sum(span) // page) for span in self.spans]
        order = torch.randperm(sum(widths) + 3, generator=generator)[: sum(widths)]
        keys, values = torch.full((2, sum(widths) + 3, page, kv_heads, size), float("nan"), dtype=self.dtype)
        q = random(sum(counts), heads + 1, size)[:, :heads]  # rows with something between them
        wanted = []
        for (start, count), table, mine in zip(self.spans, order.split(widths), q.split(counts), strict=True):
            k, v = (random(start + count, kv_heads, size) for _ in range(2))
            wanted.append(attention(mine, k, v, start, size**-0.5, self.window))
            at = torch.arange(max(0, start + 1 - self.window) if self.window else 0, start + count)
            keys[table[at // page], at % page], values[table[at // page], at % page] = k[at], v[at]
        chunks = Chunks(starts, counts, order.int(), page)
        return Made(q, CacheLayer(keys, values), chunks, size**-0.5, torch.cat(wanted))


CASES = [
    ChunkCase(torch.float32, (4, 2, 16), 16, ((0, 37), (5, 1), (70, 20))),
    ChunkCase(torch.float32, (6, 2, 24), 32, ((0, 1), (33, 90), (200, 3)), 33),
    ChunkCase(torch.bfloat16, (8, 1, 128), 64, ((130, 70), (0, 40))),
    ChunkCase(torch.bfloat16, (3, 1, 80), 64, ((63, 2), (64, 130), (0, 150)), 5),
    ChunkCase(torch.float16, (6, 2, 96), 128, ((500, 40), (0, 65)), 130),
    ChunkCase(torch.bfloat16, (9, 3, 64), 16, ((7, 50),), 20),
    ChunkCase(torch.float16, (4, 4, 256), 64, ((100, 30),), 1),
]
