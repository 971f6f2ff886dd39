"""All pieces of a step in one call: torch's variable-length flash attention, where this torch has it and it computes what it should."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

_log = logging.getLogger("compress.engine")
_WANTED = {"scale", "window_size", "enable_gqa"}  # of its arguments; younger than the function


@cache
def function() -> Callable[..., Any] | None:
    """`torch.nn.attention.varlen.varlen_attn`, or None where it is missing or too old."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if set(inspect.signature(varlen_attn).parameters) >= _WANTED else None


class Ends:
    """Where the pieces' queries and keys end, on the device, and the longest of each."""

    def __init__(self, starts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        keys = [start + count for start, count in zip(starts, counts, strict=True)]
        ends = [[0, *accumulate(counts)], [0, *accumulate(keys)]]
        self.queries, self.keys = torch.tensor(ends, dtype=torch.int32).to(device)
        self.most_queries, self.most_keys = max(counts), max(keys)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Ends, scale: float, window: int) -> torch.Tensor:
    """`[rows, heads, head_dim]`; keys and values of the pieces one after another, `[sum of lengths, kv_heads, head_dim]`."""
    compute = function()
    assert compute is not None
    return compute(
        q, k, v, ends.queries, ends.keys, ends.most_queries, ends.most_keys,
        scale=scale, window_size=(window - 1 if window else -1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


@cache
def works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, windowed: bool) -> bool:
    """Whether `attend` gives the right numbers here: tried once, on pieces with and without a cached beginning."""
    from runtime.engines.cuda.prefill import piece_attention

    if function() is None or dtype not in (torch.float16, torch.bfloat16):
        return False
    starts, counts, window = [0, 21, 3], [9, 5, 17], 6 if windowed else 0
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, size, generator=generator).to(device, dtype)

    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    q, k, v = random(sum(counts), heads), random(sum(lengths), kv_heads), random(sum(lengths), kv_heads)
    pieces = zip(q.split(counts), k.split(lengths), v.split(lengths), starts, strict=True)
    wanted = torch.cat([piece_attention(*piece, size**-0.5, window) for piece in pieces]).float()
    try:
        found = attend(q, k, v, Ends(starts, counts, device), size**-0.5, window).float()
        error = float((found - wanted).abs().max())
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as problem:
        _log.info("variable-length attention does not run here: %s", problem)
        return False
    if not error < 0.05:
        _log.warning("variable-length attention is off by %.3g here and is not used", error)
        return False
    return True
