"""The KV cache of the native engine: pages of all layers, as attention.h reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from runtime.engines.base import Chunk
from runtime.engines.native.parts import Parts
from runtime.kernels.cpu.decoder import PAGE, Block, Decoder, Op


class Recorder:
    """What every layer of one step leaves in the residual stream; `Pool.recorder` of the step's pool."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def fill(self, chunks: Sequence[Chunk], states: torch.Tensor) -> None:
        """The step is done: float32 `[layers, tokens of all chunks, hidden]`."""
        for chunk, mine in zip(chunks, states.split([len(chunk.tokens) for chunk in chunks], 1), strict=True):
            self._states[_place(chunk.pages, chunk.start)] = mine

    def of(self, pages: Sequence[int], start: int) -> torch.Tensor | None:
        """`[layers, tokens, hidden]` of the chunk of these pages that began at `start`; None: there was none."""
        return self._states.get(_place(pages, start))


def _place(pages: Sequence[int], start: int) -> tuple[int, int]:
    return start, pages[start // PAGE]  # what is written to belongs to one sequence


def decoder_of(parts: Parts, blocks: Sequence[Block]) -> Decoder:
    """A decoder with other blocks; it keeps the copies of these and of their operations that it points to."""
    decoder = Decoder()
    ctypes.pointer(decoder)[0] = parts.decoder
    decoder.layers = len(blocks)
    own = (Block * len(blocks))(*blocks)
    decoder.operations = [(Op * block.count)(*block.ops[: block.count]) for block in blocks]
    for block, operations in zip(own, decoder.operations, strict=True):
        block.ops = operations
    decoder.blocks = own
    return decoder


class Pool:
    """Pages of keys and values: for each layer `[pages, kv_heads, head_dim, PAGE]` and `[pages, kv_heads, PAGE, value_dim]`.

    Attributes:
        recorder: records the next step, once; None: nobody wants it.
    """

    def __init__(self, parts: Parts, count: int, blocks: Sequence[Block] | None = None) -> None:
        """`blocks`: the layers; None: all of the model's."""
        layers = parts.blocks if blocks is None else blocks
        sizes = (parts.head_dim, parts.value_dim) * len(layers)
        # Not touched here: the operating system gives the memory when a page is first written.
        self.tensors = [torch.empty(count, parts.kv_heads, size * PAGE, dtype=parts.cache_dtype) for size in sizes]
        self.count = count
        self.decoder = decoder_of(parts, layers)
        self.blocks = self.decoder.blocks
        for i in range(len(layers)):
            self.blocks[i].keys, self.blocks[i].values = (each.data_ptr() for each in self.tensors[2 * i : 2 * i + 2])
        self.recorder: Recorder | None = None
