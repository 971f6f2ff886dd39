"""Fused GPU engine.

It takes over a transformers model (the same weights, its linear layers are called as modules) where every part of its blocks is one that
it knows; `take_over` returns None otherwise, and the torch engine runs the model instead.

What of a sequence's numbers depends on what else is in the step: attention, norms and rotation never do. A linear layer may round
differently for another number of rows (another kernel, another split of the sums). A decode step is computed at the size of its
bucket, so its numbers depend on which bucket that is, and on nothing else: `buckets=(32,)` makes all steps of up to 32 sequences
alike, at some cost for single ones. Drafted tokens are rows of such a step, each like a sequence. Tokens of prompts are computed apart
from decode steps, all in one pass, whose number of rows counts in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from runtime.engines.base import Chunk
from runtime.engines.cuda import ops
from runtime.engines.cuda.cache import Memory, Pool, Rows
from runtime.engines.cuda.decoder import Decoder
from runtime.engines.cuda.parts import Parts, read_parts
from runtime.engines.cuda.prefill import ChunkAttention
from runtime.engines.cuda.steps import Capture, CudaGraphs, Steps
from runtime.engines.llama_structure import FusedEngine
from runtime.errors import RequestError

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine

PAGE = 64
MOST_ROWS = 2048
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
UNLIMITED = 1 << 17  # positions, where a model names no limit
_log = logging.getLogger("compress.engine")


class CudaEngine(FusedEngine):
    """See `runtime.engines.base.Engine`. Made by `take_over`.

    Args:
        page_size: positions of a page: 16, 32, or a multiple of 64.
        buckets: batch sizes that decode steps are captured for, ascending; larger batches are computed in parts.
        capture: how a decode step is captured; None: it is not. `take_over` gives CUDA graphs on CUDA devices.
        computing: `ops.choose(device)` by default.
    """

    def __init__(
        self,
        torch_engine: TorchEngine,
        parts: Parts,
        *,
        page_size: int = PAGE,
        buckets: Sequence[int] = BUCKETS,
        capture: Capture | None = None,
        computing: ops.Ops | None = None,
    ) -> None:
        super().__init__(torch_engine, parts)
        self.page_size = page_size
        self.page_bytes = 2 * len(parts.blocks) * page_size * parts.kv_heads * parts.head_dim * parts.dtype.itemsize
        self.most_rows = MOST_ROWS
        self.buckets = tuple(buckets)
        self._capture = capture
        self._width = -(-(self.context_length or UNLIMITED) // page_size)  # most pages of a sequence
        with self._on_device():
            self.decoder = Decoder(parts, computing or ops.choose(self.device), self._width * page_size)
        self._spare: Memory | None = (
            None  # of pools that were thrown away the largest, with the graphs captured over it
        )
        self._spare_lock = threading.RLock()  # a pool may be collected in the middle of anything, in `new_pages` too
        self._lock = threading.RLock()
        graphs = "no graphs" if capture is None else "decode steps as CUDA graphs"
        self.description = f"fused decoder, {self.decoder.ops.name} kernels, {graphs}"

    # ---------------------------------------------------------------- pages
    def new_pages(self, count: int, drafts: bool = False) -> Pool:
        """A pool; its memory is taken now, or is that of a pool that was thrown away, with its graphs."""
        with self._spare_lock:
            memory, self._spare = self._spare, None
        with self._on_device():
            if memory is None or memory.count < count:
                del memory
                memory = self.make_memory(count)
            return Pool(memory, count, self._release)

    def _release(self, memory: Memory) -> None:
        with self._spare_lock:
            if self._spare is None or self._spare.count < memory.count:
                self._spare = memory

    def trim(self) -> None:
        """Give back the memory that waits for the next pool."""
        self._spare = None

    def step(self, pool: Pool | Memory, chunks: Sequence[Chunk]) -> torch.Tensor:
        """As `Engine.step`. Nothing waits for the device: the logits are on it."""
        return self.verify(pool, chunks)[0]

    def verify(
        self, pool: Pool | Memory, chunks: Sequence[Chunk], hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `Engine.verify`, for chains. A drafted token is a row of a decode step, as if it were a sequence of its own.

        Args:
            pool: also what `make_memory` gave.
        """
        with self._lock, self._on_device(), torch.inference_mode():
            return self._run(_memory(pool), chunks, hidden)

    def keep(self, pool: Pool | Memory, chunk: Chunk, path: Sequence[int]) -> None:
        """As `Engine.keep`: the beginning of a chain is where it should be."""
        if list(path) != list(range(len(path))):
            raise ValueError(f"{list(path)} is not the beginning of a chain")

    def _run(self, memory: Memory, chunks: Sequence[Chunk], hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        if any(chunk.parents is not None for chunk in chunks):
            raise ValueError("this engine verifies chains, no trees")
        # Where each chunk's rows are in what is returned, and the rows that are computed in decode steps.
        logits_at = list(accumulate((chunk.outputs for chunk in chunks), initial=0))
        states_at = list(accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        decoding = [i for i, chunk in enumerate(chunks) if chunk.outputs == len(chunk.tokens)]
        reading = [i for i, chunk in enumerate(chunks) if chunk.outputs < len(chunk.tokens)]
        rows = [
            Chunk([token], chunk.start + place, chunk.pages)
            for chunk in (chunks[i] for i in decoding)
            for place, token in enumerate(chunk.tokens)
        ]
        logits: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        most = self.buckets[-1]
        for first in range(0, len(rows), most):
            found, x = self._steps(memory).run(rows[first : first + most], hidden)
            logits.append(found.to(torch.float32, copy=True))  # the next replay overwrites them
            if x is not None:
                states.append(x.to(torch.float32, copy=True))
        if reading:
            found, x = self._read(memory, [chunks[i] for i in reading], [chunks[i].outputs for i in reading], hidden)
            logits.append(found.float())
            if x is not None:
                states.append(x.float())
        order = decoding + reading
        return (
            _in_order(logits, order, logits_at, (self.parts.vocabulary, self.device)),
            _in_order(states, order, states_at, (self.parts.final_norm.shape[0], self.device)) if hidden else None,
        )

    def _steps(self, memory: Memory) -> Steps:
        if memory.steps is None:
            memory.steps = Steps(self.decoder, memory, self.buckets, self._width, self._capture)
        return memory.steps

    def read(self, pool: Pool | Memory, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        """As `Engine.read`: all tokens of the chunks in one pass, without a graph."""
        outputs = [len(chunk.tokens) if every else 1 for chunk in chunks]
        with self._lock, self._on_device(), torch.inference_mode():
            return self._read(_memory(pool), chunks, outputs, False)[0].float()

    def _read(
        self, memory: Memory, chunks: Sequence[Chunk], outputs: Sequence[int], hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `read`: logits after the last `outputs` tokens of each chunk, and what the head reads of all, if that is wanted."""
        page, parts = self.page_size, self.parts
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cached: list[int] = []
        ends: list[int] = []
        for chunk, count in zip(chunks, outputs, strict=True):
            end = chunk.start + len(chunk.tokens)
            if end > self._width * page:
                raise RequestError(f"position {end - 1} is past the {self._width * page} that the model was made for")
            pages = chunk.pages
            mine = [pages[place // page] * page + place % page for place in range(end)]
            ids += chunk.tokens
            positions += range(chunk.start, end)
            slots += mine[chunk.start :]
            cached += mine
            ends += range(len(ids) - count, len(ids))
        rows = Rows(*torch.tensor([ids, positions, slots], dtype=torch.int32).to(self.device))
        starts, counts = [chunk.start for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        attention = ChunkAttention(starts, counts, torch.tensor(cached).to(self.device), parts.scale)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return attention(q, memory.layers[layer], parts.blocks[layer].window)

        wanted = None if len(ends) == len(ids) else torch.tensor(ends).to(self.device)
        decoder, embedded = self.decoder, self.decoder.embed(rows.ids)
        if not hidden:
            return decoder(embedded, rows, memory, attend, wanted), None
        x = decoder.states(embedded, rows, memory, attend)
        return parts.head(x if wanted is None else x[wanted]), x

    def make_memory(self, count: int) -> Memory:
        """Pages that no pool shares."""
        return Memory(self.parts, self.page_size, count, self.device)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Triton launches on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


def _memory(pool: Pool | Memory) -> Memory:
    return pool.memory if isinstance(pool, Pool) else pool


def _in_order(
    found: Sequence[torch.Tensor], order: Sequence[int], starts: Sequence[int], shape: tuple[int, torch.device]
) -> torch.Tensor:
    """Rows of chunks that were computed in another order than they are wanted in.

    Args:
        found: the rows of the chunks `order`, one after another, `[rows, n]` each.
        starts: where those of each chunk begin in the result, and how many there are.
        shape: n, and the device, where there are none.
    """
    if not found:
        return torch.empty(0, shape[0], device=shape[1])
    together = found[0] if len(found) == 1 else torch.cat(list(found))
    if list(order) == list(range(len(order))):
        return together
    here = [row for chunk in order for row in range(starts[chunk], starts[chunk + 1])]
    back = sorted(range(len(here)), key=here.__getitem__)
    return together[torch.tensor(back, device=together.device)]


def take_over(
    engine: TorchEngine, *, graphs: bool = True, fuse: bool = True, any_device: bool = False, **options: Any
) -> CudaEngine | None:
    """The fused engine for this model, or None where it does not fit (`parts.why_not` says why, and so does the log).

    Args:
        graphs: replay decode steps as CUDA graphs, on CUDA devices.
        fuse: join q/k/v and gate/up where their layers allow it.
        any_device: also on others than CUDA.
        options: further ones of `CudaEngine`.
    """
    if engine.device.type != "cuda" and not any_device:
        return None
    with torch.cuda.device(engine.device) if engine.device.type == "cuda" else contextlib.nullcontext():
        parts = read_parts(engine.module, fuse)
        if isinstance(parts, Parts):
            capture = CudaGraphs(engine.device) if graphs and engine.device.type == "cuda" else None
            return CudaEngine(engine, parts, **{"capture": capture, **options})
    _log.info("the fused GPU engine does not fit this model: %s", parts)
    return None
