"""Decode steps over static memory, captured in CUDA graphs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from runtime.engines.base import Chunk
from runtime.engines.cuda.cache import Memory, Rows
from runtime.engines.cuda.decoder import Decoder
from runtime.errors import RequestError, first_line

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
        device = memory.device
        self._decoder, self._capture, self._alone = decoder, capture, alone
        # The memory owns its steps: a reference back would keep it until the garbage collector comes by.
        self._memory: Memory = weakref.proxy(memory)
        self.buckets = list(buckets)
        most, pinned = self.buckets[-1], device.type == "cuda"
        hidden = decoder.parts.final_norm.shape[0]
        self._columns = 3 if memory.stored is None else 4
        self._numbers = torch.zeros(self._columns * most, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(most, hidden, dtype=decoder.parts.dtype, device=device)
        self._tables = torch.full((most, width), memory.scratch, dtype=torch.int32, device=device)
        # The host's side of them. `_filled` is what the device has been sent.
        self._host_numbers = torch.zeros(self._columns * most, dtype=torch.int32, pin_memory=pinned)
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
        return Rows(*self._numbers[: self._columns * size].view(self._columns, size))

    def _fill(self, chunks: Sequence[Chunk]) -> None:
        size, page = len(chunks), self._memory.page_size
        tables: list[list[int]] = []
        slots: list[int] = []
        plain_slots: list[int] = []
        for chunk in chunks:
            count = chunk.start // page + 1
            if count > self._tables.shape[1]:
                most = self._tables.shape[1] * page
                raise RequestError(f"position {chunk.start} is past the {most} positions that the model was made for")
            tables.append(list(chunk.pages[:count]))
            slots.append(chunk.pages[count - 1] * page + chunk.start % page)
            if self._memory.stored is not None:
                plain_slots.append(self._memory.plain_slot(chunk.pages[count - 1], chunk.start % page))
        ids, positions = [chunk.tokens[0] for chunk in chunks], [chunk.start for chunk in chunks]
        if self._sent is not None:
            self._sent.synchronize()  # the copies of the step before have left the host's memory, as a rule long ago
        numbers = ids + positions + slots + plain_slots
        host, device = self._host_numbers[: len(numbers)], self._numbers[: len(numbers)]
        host.copy_(torch.tensor(numbers, dtype=torch.int32))
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
