"""The KV cache: pages in static memory, allocated once and used again by the next pool."""

from __future__ import annotations

import threading
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


class Store:
    """Makes pools. One memory that no pool uses is kept, with the graphs that were captured over it."""

    def __init__(self, make: Callable[[int], Memory]) -> None:
        self._make = make
        self._spare: Memory | None = None
        # A pool may be collected in the middle of anything, in `pool` too.
        self._lock = threading.RLock()

    def pool(self, count: int) -> Pool:
        """A pool of `count` pages: in the spare memory if that is large enough, which is given up otherwise."""
        with self._lock:
            memory, self._spare = self._spare, None
        if memory is None or memory.count < count:
            del memory
            memory = self._make(count)
        return Pool(memory, count, self._release)

    def trim(self) -> None:
        """Give the spare memory back."""
        with self._lock:
            self._spare = None

    def _release(self, memory: Memory) -> None:
        with self._lock:
            if self._spare is None or self._spare.count < memory.count:
                self._spare = memory
