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

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from runtime.engines.base import Chunk, output_rows
from runtime.engines.cuda import ops
from runtime.engines.cuda.cache import Memory, Pool, Rows
from runtime.engines.cuda.decoder import ChunkAttention, Decoder
from runtime.engines.fused import FusedEngine
from runtime.engines.llama_structure import Program, read_program
from runtime.errors import RequestError, first_line
from runtime.kernels.triton import gpu

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine
    from runtime.kv_cache.policy.policy import Policy
    from runtime.system.ranks import Ranks

PAGE = 64
MOST_ROWS = 2048
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
UNLIMITED = 1 << 17  # positions, where a model names no limit
_log = logging.getLogger("compress.engine")


#: Computes from what static tensors hold now. Of a captured computation, the next call of any that the same `Capture` made may overwrite
#: the result.
Computation = Callable[[], tuple[torch.Tensor, torch.Tensor]]

#: Makes a captured computation of one. May run it any number of times, so running it twice must be like running it once.
Capture = Callable[[Computation], Computation]


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool. They are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[Computation] = weakref.WeakSet()

    def __call__(self, compute: Computation) -> Computation:
        if not self._alive:  # a memory pool whose last graph is gone cannot be captured into again
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(
                2
            ):  # kernels are compiled (and measured, in `compress tune`), libraries take their workspaces
                compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for other models.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()

        def replay() -> tuple[torch.Tensor, torch.Tensor]:
            graph.replay()
            return output

        replay.graph = graph  # type: ignore[attr-defined]
        self._alive.add(replay)
        return replay

    def reset(self) -> None:
        """Drop what was captured, which cannot be replayed any more: NCCL closes no communicator that graphs use."""
        for replay in list(self._alive):
            replay.graph.reset()  # type: ignore[attr-defined]


_FEW = 4  # page tables that are sent one by one


@cache
def _say_once(reason: str) -> None:
    _log.warning("decode steps cannot be captured in a CUDA graph and run without one: %s", reason)


class Steps:
    """The steps over one memory.

    A batch is filled up to the next bucket with padding rows: token 0 at position 0 of the scratch page. Their results are
    dropped, and they touch no page of anybody.

    Args:
        buckets: batch sizes, ascending. width: most pages of a sequence. capture: None: never.
        alone: steps that cannot be captured run without; ranks, whose warm-up runs sum over all of them, must fail together.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: Memory,
        buckets: Sequence[int],
        width: int,
        capture: Capture | None,
        alone: bool = True,
    ) -> None:
        device = memory.keys[0].device
        self._decoder, self._capture, self._alone = decoder, capture, alone
        # The memory owns its steps: a reference back would keep it until the garbage collector comes by.
        self._memory: Memory = weakref.proxy(memory)
        self.buckets = list(buckets)
        most, pinned = self.buckets[-1], device.type == "cuda"
        hidden = decoder.parts.final_norm.shape[0]
        self._numbers = torch.zeros(3 * most, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(most, hidden, dtype=decoder.parts.dtype, device=device)
        self._tables = torch.full((most, width), memory.scratch, dtype=torch.int32, device=device)
        # The host's side of them. `_filled` is what the device has been sent.
        self._host_numbers = torch.zeros(3 * most, dtype=torch.int32, pin_memory=pinned)
        self._host_tables = torch.full((most, width), memory.scratch, dtype=torch.int32, pin_memory=pinned)
        self._filled: list[list[int]] = [[memory.scratch] for _ in range(most)]
        self._sent = torch.cuda.Event() if pinned else None
        self._captured: dict[int, Computation] = {}  # by bucket
        self._width: int | None = None

    def run(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[len(chunks), vocabulary]` of chunks of one token each, at most as many as the largest bucket, and what the head
        reads, `[len(chunks), hidden]`.

        Views: the next run overwrites them.
        """
        count = len(chunks)
        size = next(size for size in self.buckets if size >= count)
        self._fill([*chunks, *[Chunk([0], 0, [self._memory.scratch])] * (size - count)])
        if size not in self._captured:
            self._captured[size] = self._make(size)
        logits, states = self._captured[size]()
        return logits[:count], states[:count]

    # ---------------------------------------------------------------- inputs
    def _rows(self, size: int) -> Rows:
        ids, positions, slots = self._numbers[: 3 * size].view(3, size)
        return Rows(ids, positions, slots)

    def _fill(self, chunks: Sequence[Chunk]) -> None:
        size, page = len(chunks), self._memory.page_size
        tables: list[list[int]] = []
        slots: list[int] = []
        for chunk in chunks:
            count = chunk.start // page + 1
            if count > self._tables.shape[1]:
                most = self._tables.shape[1] * page
                raise RequestError(f"position {chunk.start} is past the {most} positions that the model was made for")
            tables.append(list(chunk.pages[:count]))
            slots.append(chunk.pages[count - 1] * page + chunk.start % page)
        ids, positions = [chunk.tokens[0] for chunk in chunks], [chunk.start for chunk in chunks]
        if self._sent is not None:
            self._sent.synchronize()  # the copies of the step before have left the host's memory, as a rule long ago
        host, device = self._host_numbers[: 3 * size], self._numbers[: 3 * size]
        host.copy_(torch.tensor(ids + positions + slots, dtype=torch.int32))
        device.copy_(host, non_blocking=True)
        self._send_tables(tables)
        if self._sent is not None:
            self._sent.record()
        if not self._decoder.embeds:  # it cannot be captured: before every replay instead
            self._hidden[:size] = self._decoder.embed(self._rows(size).ids)
        # Plain attention reads whole tables; only a graph, whose shapes are frozen, needs all columns.
        whole = self._capture is not None
        self._width = None if whole else max(len(table) for table in tables)

    def _send_tables(self, tables: list[list[int]]) -> None:
        """Page tables that are not those of the step before, to the device."""
        changed = [row for row, table in enumerate(tables) if self._filled[row] != table]
        for row in changed:
            table = self._filled[row] = tables[row]
            self._host_tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        if len(changed) > _FEW:  # whole rows lie together, those in between too, whose host side is as it was sent
            rows = slice(changed[0], changed[-1] + 1)
            self._tables[rows].copy_(self._host_tables[rows], non_blocking=True)
            return
        for row in changed:
            count = len(tables[row])
            self._tables[row, :count].copy_(self._host_tables[row, :count], non_blocking=True)

    # ---------------------------------------------------------------- computation
    def _compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        decoder, memory, rows = self._decoder, self._memory, self._rows(size)
        parts, attention, tables = decoder.parts, decoder.ops.decode_attention, self._tables[:size]

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            window = parts.blocks[layer].window
            return attention(q, memory.layers[layer], tables, rows.positions, parts.scale, window, self._width)

        hidden = decoder.embed(rows.ids) if decoder.embeds else self._hidden[:size]
        return decoder(hidden, rows, memory, attend)

    def _make(self, size: int) -> Computation:
        compute = partial(self._compute, size)
        if self._capture is not None:
            try:
                return self._capture(compute)
            except (RuntimeError, NotImplementedError) as error:
                if not self._alone:
                    raise
                self._capture = None
                _say_once(first_line(error))
        return compute


class CudaEngine(FusedEngine):
    """See `runtime.engines.base.Engine`. Made by `take_over`.

    Args:
        page_size: positions of a page: 16, 32, or a multiple of 64.
        buckets: batch sizes that decode steps are captured for, ascending; larger batches are computed in parts.
        capture: how a decode step is captured; None: it is not. `take_over` gives CUDA graphs on CUDA devices.
        computing: `ops.choose(device)` by default.
        ranks: that compute the model together (`tensor_parallel`), where `parts` is the program of one of them.
    """

    def __init__(
        self,
        torch_engine: TorchEngine,
        parts: Program,
        *,
        page_size: int = PAGE,
        buckets: Sequence[int] = BUCKETS,
        capture: Capture | None = None,
        computing: ops.Ops | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(torch_engine, parts)
        self.ranks = ranks
        self.page_size = page_size
        self.page_bytes = 2 * len(parts.blocks) * page_size * parts.kv_heads * parts.head_dim * parts.dtype.itemsize
        self.most_rows = MOST_ROWS
        self.buckets = tuple(buckets)
        self._capture = capture
        self._width = -(-(self.context_length or UNLIMITED) // page_size)  # most pages of a sequence
        with self._on_device():
            self.decoder = Decoder(parts, computing or ops.choose(self.device), self._width * page_size)
        # Of pools that were thrown away the largest, with the graphs captured over it.
        self._spare: Memory | None = None
        self._numbers = itertools.count()
        self._spare_lock = threading.RLock()  # a pool may be collected in the middle of anything, in `new_pages` too
        self._lock = threading.RLock()
        graphs = "no graphs" if capture is None else "decode steps as CUDA graphs"
        among = "" if ranks is None else f", rank {ranks.rank} of {ranks.size}"
        self.description = f"fused decoder, {self.decoder.ops.name} kernels, {graphs}{among}"

    def explain(self) -> dict[str, str]:
        """As the modules say, but for experts computed together, which their modules do not compute."""
        found = super().explain()
        names = {module: name for name, module in self.module.named_modules()}
        for each in self.parts.mixtures:
            if each.stacks is not None and self.decoder.ops is not ops.TORCH:
                name = names[each.module]
                mine = [layer for layer in found if layer.startswith(f"{name}.")]
                found |= dict.fromkeys(mine or [name], "experts-triton")
        return found

    # ---------------------------------------------------------------- pages
    def new_pages(self, count: int, drafts: bool = False) -> Pool:
        """A pool; its memory is taken now, or is that of a pool that was thrown away, with its graphs."""
        with self._spare_lock:
            memory, self._spare = self._spare, None
        with self._on_device():
            usable = memory is not None and memory.count >= count
            if self.ranks is not None:
                # When a pool is collected may differ between ranks. Each must capture graphs when the others do: the runs before a
                # capture sum over the ranks.
                every = self.ranks.every(memory.number if memory is not None and usable else None)
                usable = usable and len(set(every)) == 1
            if memory is None or not usable:
                del memory
                memory = self.make_memory(count)
            return Pool(memory, count, self._release)

    def _release(self, memory: Memory) -> None:
        with self._spare_lock:
            if self._spare is None or self._spare.count < memory.count:
                self._spare = memory

    @property
    def spare_pages(self) -> int:
        """Of the pool that was thrown away last, or larger."""
        memory = self._spare
        return 0 if memory is None else memory.count

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
        decoding = [chunk for chunk in chunks if chunk.outputs == len(chunk.tokens)]
        reading = [chunk for chunk in chunks if chunk.outputs < len(chunk.tokens)]
        order = sorted(
            range(len(chunks)), key=lambda i: chunks[i].outputs < len(chunks[i].tokens)
        )  # decode steps first
        rows = [
            Chunk([token], chunk.start + place, chunk.pages)
            for chunk in decoding
            for place, token in enumerate(chunk.tokens)
        ]
        logits: list[torch.Tensor] = []
        states: list[torch.Tensor] = []

        def add(found: torch.Tensor, x: torch.Tensor) -> None:
            logits.append(found.to(torch.float32, copy=True))  # the next replay overwrites them
            if hidden:
                states.append(x.to(torch.float32, copy=True))

        if rows and memory.steps is None:
            memory.steps = Steps(
                self.decoder, memory, self.buckets, self._width, self._capture, alone=self.ranks is None
            )
        most = self.buckets[-1]
        for first in range(0, len(rows), most):
            add(*memory.steps.run(rows[first : first + most]))
        if reading:
            add(*self._read(memory, reading))

        def in_order(found: list[torch.Tensor], width: int, counts: Sequence[int]) -> torch.Tensor:
            """The rows of the chunks, `[rows, width]`, in the order in which they are wanted."""
            if not found:
                return torch.empty(0, width, device=self.device)
            together = found[0] if len(found) == 1 else torch.cat(found)
            if order == sorted(order):
                return together
            parts = together.split([counts[i] for i in order])
            return torch.cat([parts[order.index(i)] for i in range(len(order))])

        width = len(self.parts.final_norm)
        return (
            in_order(logits, self.logits_width, [chunk.outputs for chunk in chunks]),
            in_order(states, width, [len(chunk.tokens) for chunk in chunks]) if hidden else None,
        )

    def read(self, pool: Pool | Memory, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        """As `Engine.read`: all tokens of the chunks in one pass, without a graph."""
        with self._lock, self._on_device(), torch.inference_mode():
            return self._read(_memory(pool), chunks, every)[0].float()

    def _read(self, memory: Memory, chunks: Sequence[Chunk], every: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """As `read`: logits after the last `outputs` tokens of each chunk, and what the head reads of all."""
        page, parts = self.page_size, self.parts
        starts, counts = [chunk.start for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        most, ends = self._width * page, [start + count for start, count in zip(starts, counts, strict=True)]
        if max(ends) > most:
            raise RequestError(f"position {max(ends) - 1} is past the {most} that the model was made for")
        # Where each sequence's tokens are in the cache, from its first one on.
        places = [
            [chunk.pages[at // page] * page + at % page for at in range(end)]
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        ids = [token for chunk in chunks for token in chunk.tokens]
        positions = [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)]
        slots = [slot for mine, start in zip(places, starts, strict=True) for slot in mine[start:]]
        rows = Rows(*torch.tensor([ids, positions, slots], dtype=torch.int32).to(self.device))
        cached = torch.tensor([slot for mine in places for slot in mine]).to(self.device)
        attention = ChunkAttention(starts, counts, cached, parts.scale)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return attention(q, memory.layers[layer], parts.blocks[layer].window)

        outputs = output_rows(chunks, every)
        wanted = None if len(outputs) == len(ids) else torch.tensor(outputs).to(self.device)
        return self.decoder(self.decoder.embed(rows.ids), rows, memory, attend, wanted)

    def make_memory(self, count: int) -> Memory:
        """Pages that no pool shares."""
        return Memory(self.parts, self.page_size, count, self.device, next(self._numbers))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Events, pinned memory and captures are those of the current device."""
        return gpu.entered(self.device)


def _memory(pool: Pool | Memory) -> Memory:
    return pool.memory if isinstance(pool, Pool) else pool


def take_over(engine: TorchEngine, policy: Policy | None = None) -> CudaEngine | None:
    """The fused engine for this model, or None where it does not fit (the log says why)."""
    if engine.device.type != "cuda" or policy is not None:
        return None
    if gpu.capability(engine.device) < (8, 0):
        _log.info("the fused GPU engine needs an NVIDIA GPU of compute capability 8.0 or later")
        return None
    computing = ops.choose(engine.device)
    missing = None if computing is ops.TORCH else ops.missing_launch(engine.module, engine.device)
    if missing is not None:
        _log.info("triton is not installed, and no kernel of experts compiled ahead is right for %s", missing)
        return None
    # Without Triton every expert would compute every row.
    program = read_program(engine.module, fuse=True, mixtures=computing is not ops.TORCH)
    if isinstance(program, Program):
        if program.mixtures:
            torch.cuda.empty_cache()  # what experts were in is many small blocks, of no use to larger tensors
        return CudaEngine(engine, program, capture=CudaGraphs(engine.device), computing=computing)
    _log.info("the fused GPU engine does not fit this model: %s", program)
    return None
