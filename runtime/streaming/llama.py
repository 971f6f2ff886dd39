"""The lean CPU engine with streamed blocks: C runs some layers at a time, on the addresses of the buffer that holds them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.engines.base import Piece
from runtime.engines.llama import LlamaEngine, Pool
from runtime.engines.llama_parts import Parts
from runtime.engines.torch import TorchEngine
from runtime.kernels.cpu.decoder import Block, Step
from runtime.streaming.ring import Ring


class StreamedLlama(LlamaEngine):
    """`LlamaEngine` whose blocks `moves` come out of a ring. Threads that call at once wait for one another."""

    def __init__(
        self,
        engine: TorchEngine,
        parts: Parts,
        moves: dict[int, Moves],
        ring: Ring,
        buffers: list[torch.Tensor],
        held: int,
    ) -> None:
        super().__init__(engine, parts)
        self.weight_bytes = held
        self.ring = ring
        self._moves = moves
        self._buffers = buffers
        self._runs = list(_runs(len(parts.blocks), moves))
        self._lock = threading.RLock()

    def _run(self, pool: Pool, pieces: Sequence[Piece], outputs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            return super()._run(pool, pieces, outputs)

    def _compute(self, step: Step, pool: Pool) -> None:
        outputs, step.outputs = step.outputs, 0
        self.ring.restart()
        for first, last in self._runs:
            step.first, step.last = first, last
            if last == len(self.parts.blocks):
                step.outputs = outputs
            moves = self._moves.get(first)
            if moves is None:
                super()._compute(step, pool)
                continue
            with self.ring.block(first) as slot:
                moves.apply(pool.blocks[first], self._buffers[slot].data_ptr())
                super()._compute(step, pool)

    def close(self) -> None:
        """Stop reading and free the buffers; the model cannot compute any more."""
        with self._lock:
            self.ring.close()


class Moves:
    """The addresses within a C structure that point into a range of memory, as distances from the range's begin."""

    def __init__(self, block: Block, begin: int, size: int) -> None:
        self._places = [
            (offset, address - begin) for offset, address in _addresses(block) if begin <= address < begin + size
        ]

    def apply(self, block: Block, base: int) -> None:
        """Let a copy of the structure point to the same things in a range that begins at `base`."""
        at = ctypes.addressof(block)
        for offset, distance in self._places:
            ctypes.c_void_p.from_address(at + offset).value = base + distance


def _addresses(structure: ctypes.Structure, at: int = 0) -> Iterator[tuple[int, int]]:
    for name, kind in structure._fields_:  # type: ignore[misc]
        value, place = getattr(structure, name), at + getattr(type(structure), name).offset
        if issubclass(kind, ctypes.Structure):
            yield from _addresses(value, place)
        elif kind is ctypes.c_void_p and value is not None:
            yield place, value


def _runs(count: int, streamed: Any) -> Iterator[tuple[int, int]]:
    """Ranges of layers for one call each: every streamed layer by itself."""
    first = 0
    for layer in range(count):
        if layer in streamed:
            if first < layer:
                yield first, layer
            yield layer, layer + 1
            first = layer + 1
    if first < count:
        yield first, count
