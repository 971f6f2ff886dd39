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
import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from runtime.engines.base import Chunk, Overhead, Usage, output_rows
from runtime.engines.cuda import ops
from runtime.engines.cuda.cache import Chunks, Memory, Pool, Rows
from runtime.engines.cuda.decoder import Decoder
from runtime.engines.cuda.steps import Capture, CudaGraphs, Steps
from runtime.engines.cuda.storage import MOST_ROWS, Storage, storage_of
from runtime.engines.fused import FusedEngine
from runtime.engines.llama_structure import Program, read_program
from runtime.engines.plain_pages import PlainPages
from runtime.errors import RequestError
from runtime.kernels.triton import gpu

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine
    from runtime.kv_cache.policy.policy import Policy
    from runtime.system.ranks import Ranks

PAGE = 64
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
        self.storage: Storage | None = None
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
        if self.storage is not None:
            pages = f"pages of the engine with CUDA graphs, {self.storage}"
            found |= {f"kv_cache.{number}": pages for number in self.storage.layers(self.parts)}
        return found

    # ---------------------------------------------------------------- pages
    def hold(self, policy: Policy) -> str | None:
        """From now on pools hold pages as a policy says; the reason, where they cannot."""
        storage = storage_of(policy, self.parts, self.page_size)
        if isinstance(storage, str):
            return storage
        self.policy, self.storage = policy, storage
        self.description += f", compressed cache ({policy.describe()})"
        page, plain = (of(self.parts, self.page_size) for of in (storage.page_bytes, storage.plain_bytes))
        self.page_bytes = page + page // 8  # with its share of `Storage.places`
        self.overhead = Overhead(math.ceil(storage.least_places(self.page_size) * plain / self.page_bytes))
        self.trim()  # memory of another storage
        return None

    def sharing(self, pool: Pool) -> PlainPages | None:
        return pool.memory.plain

    def draft_room(self, pool: Pool) -> int | None:
        """With more, a draft could fill a page that another of its tokens would see stored."""
        return None if self.storage is None else self.storage.recent

    def usage(self, pool: Pool, touched: int) -> Usage:
        if self.storage is None:
            return super().usage(pool, touched)
        return Usage(touched * self.storage.page_bytes(self.parts, self.page_size) + pool.memory.plain_bytes)

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
                memory = self._make_memory(count, self.storage)
            memory.restart()
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

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As `Engine.logits`, over plain pages whatever the policy."""
        if self.storage is None:
            return super().logits(input_ids)
        return self._logits(input_ids, self.make_memory(-(-input_ids.shape[1] // self.page_size)))

    def step(self, pool: Pool | Memory, chunks: Sequence[Chunk]) -> torch.Tensor:
        """As `Engine.step`. The logits are on the device; the host waits for it only after a step that stored pages (`_check`)."""
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
        room = MOST_ROWS if memory.stored is None else memory.stored.recent + 1

        def is_read(chunk: Chunk) -> bool:
            """Whether a chunk is computed as a prompt is, not as rows of a decode step."""
            return chunk.outputs < len(chunk.tokens) or len(chunk.tokens) > room

        decoding = [chunk for chunk in chunks if not is_read(chunk)]
        reading = [chunk for chunk in chunks if is_read(chunk)]
        order = sorted(range(len(chunks)), key=lambda i: is_read(chunks[i]))  # decode steps first
        late = self._begin(memory, chunks, reading)
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
            add(*self._read(memory, reading, late))
        self._check(memory)

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
            memory = _memory(pool)
            logits = self._read(memory, chunks, self._begin(memory, chunks, chunks), every)[0].float()
            self._check(memory)
            return logits

    def _begin(self, memory: Memory, chunks: Sequence[Chunk], reading: Sequence[Chunk]) -> list[int]:
        """Allocate plain pages for what chunks write, and store in few bits the older pages that they read so.

        Args:
            reading: those of the chunks that are computed as prompts.

        Returns:
            Pages that `reading` itself writes: `_read` stores them layer by layer.

        Raises:
            RequestError: a chunk ends past the last position.
        """
        page = self.page_size
        most, end = self._width * page, max((chunk.start + len(chunk.tokens) for chunk in chunks), default=0)
        if end > most:
            raise RequestError(f"position {end - 1} is past the {most} that the model was made for")
        pages = memory.begin(chunks)
        written = {
            each
            for chunk in reading
            for each in chunk.pages[chunk.start // page : -(-(chunk.start + len(chunk.tokens)) // page)]
        }
        ready = [each for each in pages if each not in written]
        if ready and memory.stored is not None:
            self.decoder.ops.store(memory.stored, torch.tensor(ready, dtype=torch.int32).to(self.device))
        return [each for each in pages if each in written]

    def _check(self, memory: Memory) -> None:
        """RequestError where a key or value was none that the storage can hold."""
        if memory.stored is not None and memory.pop_invalid():
            raise RequestError(
                f"kv_cache ({self.storage}): a key or value is not finite, or beyond 65504, the most that int2, int4 and int8 hold; "
                "load with a wider dtype (float32, bfloat16), or take keys: fp8 or plain (values likewise) where it is only large"
            )

    def _read(
        self, memory: Memory, chunks: Sequence[Chunk], late: Sequence[int], every: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `read`: logits after the last `outputs` tokens of each chunk, and what the head reads of all. `late`: from `_begin`."""
        page, parts = self.page_size, self.parts
        starts, counts = [chunk.start for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        ids = [token for chunk in chunks for token in chunk.tokens]
        positions = [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)]
        slots = [
            chunk.pages[at // page] * page + at % page
            for chunk, end in zip(chunks, ends, strict=True)
            for at in range(chunk.start, end)
        ]
        numbers = [ids, positions, slots]
        if memory.stored is not None:
            numbers.append([memory.plain_slot(slot // page, slot % page) for slot in slots])
        rows = Rows(*torch.tensor(numbers, dtype=torch.int32).to(self.device))
        pages = [each for chunk, end in zip(chunks, ends, strict=True) for each in chunk.pages[: -(-end // page)]]
        read = Chunks(starts, counts, torch.tensor(pages, dtype=torch.int32).to(self.device), page)
        full = torch.tensor(late, dtype=torch.int32).to(self.device)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            held = memory.layers[layer]
            if late and held.stored is not None:
                self.decoder.ops.store(held.stored, full)
            return self.decoder.ops.chunk_attention(q, held, read, parts.scale, parts.blocks[layer].window)

        outputs = output_rows(chunks, every)
        wanted = None if len(outputs) == len(ids) else torch.tensor(outputs).to(self.device)
        return self.decoder(self.decoder.embed(rows.ids), rows, memory, attend, wanted)

    def make_memory(self, count: int) -> Memory:
        """Pages that no pool shares, all plain: tokens of drafts are taken back again and again."""
        return self._make_memory(count, None)

    def _make_memory(self, count: int, storage: Storage | None) -> Memory:
        return Memory(self.parts, self.page_size, count, self.device, next(self._numbers), storage)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Events, pinned memory and captures are those of the current device."""
        return gpu.entered(self.device)


def _memory(pool: Pool | Memory) -> Memory:
    return pool.memory if isinstance(pool, Pool) else pool


def take_over(engine: TorchEngine, policy: Policy | None = None) -> CudaEngine | None:
    """The fused engine for this model and its cache, or None where it does not fit; the log and the engine's `explain` say why."""
    found = _take_over(engine, policy)
    if isinstance(found, CudaEngine):
        return found
    _log.info("transformers' modules compute this model, not the engine with CUDA graphs: %s", found)
    engine.why_modules = f"not the engine with CUDA graphs: {found}"
    return None


def _take_over(engine: TorchEngine, policy: Policy | None) -> CudaEngine | str:
    """The engine, or the reason why it does not run the model."""
    if engine.device.type != "cuda":
        return "that engine needs a GPU"
    if gpu.capability(engine.device) < (8, 0):
        return "that engine needs an NVIDIA GPU of compute capability 8.0 or later"
    computing = ops.choose(engine.device)
    # Without Triton every expert would compute every row.
    mixtures = computing is not ops.TORCH
    program = read_program(engine.module, mixtures=mixtures)  # nothing is joined before it is known to fit
    if isinstance(program, str):
        return program
    storage = None if policy is None else storage_of(policy, program, PAGE)
    if isinstance(storage, str):
        return storage
    if mixtures:
        missing = ops.missing_launch(engine.module, engine.device)
        if missing is not None:
            return f"triton is not installed, and no kernel of experts compiled ahead is right for {missing}"
        missing = None if storage is None else ops.missing_page_kernel(program, storage, PAGE, engine.device)
        if missing is not None:
            return f"triton is not installed, and no kernel of stored pages compiled ahead is right for {missing}"
    program = read_program(engine.module, fuse=True, mixtures=mixtures)
    assert isinstance(program, Program), program
    if program.mixtures:
        torch.cuda.empty_cache()  # what experts were in is many small blocks, of no use to larger tensors
    found = CudaEngine(engine, program, capture=CudaGraphs(engine.device), computing=computing)
    reason = None if policy is None else found.hold(policy)
    return found if reason is None else reason
