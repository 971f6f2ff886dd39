"""A Llama-like decoder over packed rows: tokens of any sequences side by side, no batch dimension, no padding.

Prompts are read in chunks: each token sees its sequence's earlier ones in the cache, and those of its chunk before it. All chunks of a
step are one call of torch's variable-length flash attention, where that computes what it should.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from runtime.engines.cuda import stored_pages
from runtime.engines.cuda.cache import CacheLayer, Memory, Rows, StoredLayers
from runtime.engines.cuda.ops import Ops
from runtime.engines.cuda.stored_pages import masked_attention
from runtime.engines.llama_structure import FeedForward, Program, RoutedExperts

_log = logging.getLogger("compress.engine")

#: Block number and queries `[rows, heads, head_dim]` -> what they find in the cache, the same shape.
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class Decoder:
    """The forward pass. Linear layers are called as modules, what lies between them as `ops`.

    Attributes:
        embeds: whether `embed` may be captured in a graph.
    """

    def __init__(self, parts: Program, ops: Ops, positions: int) -> None:
        self.parts = parts
        self.ops = ops
        self.rotations = torch.cat(parts.rotation(positions), dim=-1)
        self.embeds = type(parts.embedding) is nn.Embedding

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]`."""
        return self.parts.embedding(ids).to(self.parts.dtype)

    def __call__(
        self, hidden: torch.Tensor, rows: Rows, memory: Memory, attend: Attend, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[rows or wanted, vocabulary]` and what the head reads of all rows, `[rows, hidden]`, both in the model's dtype.

        Keys and values of all rows are written.

        Args:
            hidden: `embed(rows.ids)`.
            wanted: indices of the rows whose logits are computed; None: all.
        """
        parts, norm = self.parts, self.ops.rms_norm
        x, residual = norm(hidden, parts.blocks[0].input_norm, parts.eps)
        for i, block in enumerate(parts.blocks):
            layer = memory.layers[i]
            q = self.ops.rotate_and_store(block.qkv(x), block.norms, parts.eps, self.rotations, rows.of(layer), layer)
            found = block.output(attend(i, q).reshape(x.shape[0], -1))
            x, residual = norm(found, block.mlp_norm, parts.eps, residual)
            found = self._feed_forward(block.mlp, x)
            if i + 1 < len(parts.blocks):
                x, residual = norm(found, parts.blocks[i + 1].input_norm, parts.eps, residual)
        x, _ = norm(found, parts.final_norm, parts.eps, residual)
        return parts.head(x if wanted is None else x[wanted]), x

    def _feed_forward(self, mlp: FeedForward | RoutedExperts, x: torch.Tensor) -> torch.Tensor:
        if isinstance(mlp, RoutedExperts):
            return self.ops.mixture(x, mlp)
        found: torch.Tensor = mlp.down(self.ops.swiglu(mlp.gate_up.whole(x)))
        return found


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, window: int
) -> torch.Tensor:
    """Causal attention of one chunk.

    Args:
        q: `[tokens, heads, head_dim]`, at positions start ...
        k, v: `[start + tokens, kv_heads, head_dim]`.
        window: each token sees the last `window` positions, its own included; 0: all.
    """
    tokens, heads, _ = q.shape
    ends = k.shape[0]
    first = max(0, start + 1 - window) if window else 0  # nobody sees what lies before
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k[first:], v[first:]))
    grouped = heads != k.shape[1]
    if start == 0 and (not window or window >= tokens):
        y = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return y[0].transpose(0, 1)
    place = torch.arange(first, ends, device=q.device)[None]

    def seen(at: torch.Tensor) -> torch.Tensor:
        return (place <= at) & (place > at - window) if window else place <= at

    return masked_attention(q, k[first:], v[first:], start, scale, seen)


class ChunkAttention:
    """Attention of the chunks of a step, whose rows lie one after another.

    Args:
        starts: position of each chunk's first token. counts: its tokens.
        slots: int64, on the device: where the positions 0 .. start + count - 1 of each chunk's sequence are in the cache, one
            chunk after another.
        pages: for each chunk, int64 `[n]` on the device, its sequence's pages up to its end; only layers with stored pages need them.
    """

    def __init__(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        slots: torch.Tensor,
        scale: float,
        pages: Sequence[torch.Tensor] = (),
    ) -> None:
        self._starts, self._counts, self._slots, self._scale = list(starts), list(counts), slots, scale
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self._pages = pages
        self._plain: ChunkAttention | None = None  # of chunks that see plain pages only, in layers with stored ones

    def __call__(self, q: torch.Tensor, layer: CacheLayer, window: int) -> torch.Tensor:
        """`[rows, heads, head_dim]`."""
        stored = layer.stored
        if stored is not None:
            return self._stored(q, layer, stored)
        k, v = (tensor.flatten(0, 1)[self._slots] for tensor in layer[:2])
        at_once = q.device.type == "cuda" and is_exact(q.device, q.dtype, *q.shape[1:2], *k.shape[1:], window > 0)
        return self.together(q, k, v, window) if at_once else self.apart(q, k, v, window)

    def _stored(self, q: torch.Tensor, layer: CacheLayer, stored: StoredLayers) -> torch.Tensor:
        """Chunks that read plain pages only are computed as over a plain cache, so that others do not change them; those go one by one."""
        parts = dict(enumerate(q.split(self._counts)))
        plain = [i for i, length in enumerate(self._lengths) if stored.begin_of_recent(length - 1) == stored.first]
        if plain:
            if self._plain is None:
                page = layer.keys.shape[1]
                slots = torch.cat([self._slots.split(self._lengths)[i] for i in plain])
                slots = stored.places[slots // page].long() * page + slots % page
                starts, counts = ([each[i] for i in plain] for each in (self._starts, self._counts))
                self._plain = ChunkAttention(starts, counts, slots, self._scale)
            found = self._plain(torch.cat([parts[i] for i in plain]), CacheLayer(*layer[:2]), 0)
            parts |= dict(zip(plain, found.split(self._plain._counts), strict=True))
        for i in parts.keys() - set(plain):
            parts[i] = stored_pages.chunk_attention(parts[i], layer, self._pages[i], self._starts[i], self._scale)
        return torch.cat(list(parts.values()))

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Where the chunks' queries and keys end, int32 `[2, chunks + 1]`, on the device."""
        ends = [[0, *accumulate(self._counts)], [0, *accumulate(self._lengths)]]
        return torch.tensor(ends, dtype=torch.int32).to(self._slots.device)

    def together(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        """In one call; keys and values of the chunks one after another, `[sum of lengths, kv_heads, head_dim]`.

        Keys are not split among programs: how they were would follow from the longest sequence of the step, and so would the last bits of
        all others. A torch that cannot be told so fails, and `is_exact` says no.
        """
        queries, keys = self._ends
        found: Any = varlen_attn(
            q, k, v, queries, keys, max(self._counts), max(self._lengths),
            scale=self._scale, window_size=(window - 1 if window else -1, 0), enable_gqa=q.shape[1] != k.shape[1],
            num_splits=1,
        )  # fmt: skip
        return found

    def apart(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        """As `together`, chunk by chunk."""
        chunks = zip(q.split(self._counts), k.split(self._lengths), v.split(self._lengths), self._starts, strict=True)
        return torch.cat([chunk_attention(*chunk, self._scale, window) for chunk in chunks])


@cache
def is_exact(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, windowed: bool) -> bool:
    """Whether chunks may be computed `together` here: tried once, on chunks with and without a cached beginning."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    starts, counts, window = [0, 21, 3], [9, 5, 17], 6 if windowed else 0
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, size, generator=generator).to(device, dtype)

    length = sum(starts) + sum(counts)
    attention = ChunkAttention(starts, counts, torch.arange(length, device=device), size**-0.5)
    q, k, v = random(sum(counts), heads), random(length, kv_heads), random(length, kv_heads)
    wanted = attention.apart(q, k, v, window).float()
    try:
        error = float((attention.together(q, k, v, window).float() - wanted).abs().max())
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as problem:
        _log.info("variable-length attention does not run here: %s", problem)
        return False
    if not error < 0.05:
        _log.warning("variable-length attention is off by %.3g here and is not used", error)
        return False
    return True
