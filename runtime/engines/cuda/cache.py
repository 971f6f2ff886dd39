"""The KV cache: pages in static memory, allocated once and used again by the next pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runtime.engines.llama_structure import Program


@dataclass(frozen=True)
class Rows:
    """Tokens of a step, int32 `[rows]`: ids, positions in their sequences, and slots `page * page_size + place in the page`."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class CacheLayer(NamedTuple):
    """One layer of the cache, keys and values `[pages, page_size, kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


class Memory:
    """Keys and values of all layers, each `[pages + 1, page_size, kv_heads, head_dim]`; the last page is scratch, for padding.

    Attributes:
        tensors: keys and values of the first layer, of the second, ...
        scratch: the page that padding writes to.
        number: of the memories that an engine has made.
        steps: `runtime.engines.cuda.engine.Steps` over this memory, whose graphs hold its addresses; made on first use.
    """

    def __init__(self, program: Program, page_size: int, count: int, device: torch.device, number: int = 0) -> None:
        shape = (count + 1, page_size, program.kv_heads, program.head_dim)
        # Zeros: the plain attention multiplies what it masks, and memory that was never written may hold NaN.
        self.tensors = [torch.zeros(shape, dtype=program.dtype, device=device) for _ in range(2 * len(program.blocks))]
        self.keys, self.values = self.tensors[0::2], self.tensors[1::2]
        self.layers = [CacheLayer(*layer) for layer in zip(self.keys, self.values, strict=True)]
        self.count = self.scratch = count
        self.page_size, self.number = page_size, number
        self.steps: Any = None


class Pool:
    """Pages 0 .. count-1. When it is thrown away, its memory waits for the next pool."""

    def __init__(self, memory: Memory, count: int, release: Callable[[Memory], None]) -> None:
        self.memory = memory
        self.count = count
        weakref.finalize(self, release, memory).atexit = False
