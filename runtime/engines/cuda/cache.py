"""The KV cache: pages in static memory, allocated once and used again by the next pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from runtime.engines.cuda.parts import Parts


class Memory:
    """Keys and values of all layers, each `[pages + 1, page_size, kv_heads, head_dim]`; the last page is scratch, for padding.

    Attributes:
        steps: `runtime.engines.cuda.steps.Steps` over this memory, whose graphs hold its addresses; made on first use.
    """

    def __init__(self, parts: Parts, page_size: int, count: int, device: torch.device) -> None:
        shape = (count + 1, page_size, parts.kv_heads, parts.head_dim)
        # Zeros: the plain attention multiplies what it masks, and memory that was never written may hold NaN.
        make = [torch.zeros(shape, dtype=parts.dtype, device=device) for _ in range(2 * len(parts.blocks))]
        self.keys, self.values = make[0::2], make[1::2]
        self.count = count
        self.page_size = page_size
        self.steps: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values]

    @property
    def scratch(self) -> int:
        """The page that padding writes to."""
        return self.count


class Pool:
    """Pages 0 .. count-1. When it is thrown away, its memory waits for the next pool."""

    def __init__(self, memory: Memory, count: int, release: Callable[[Memory], None]) -> None:
        self.memory = memory
        self.count = count
        weakref.finalize(self, release, memory).atexit = False
