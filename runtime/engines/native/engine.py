"""Native CPU engine: a decoder whose whole step runs in C, as a program of typed operations, with a paged KV cache.

It takes over a transformers model (the same weights, nothing is copied) where every part of its forward pass is an operation that
program.h knows; `read_parts` says what is missing otherwise, and the torch engine runs the model instead. The residual stream, norms
and attention are float32, so its numbers are closer to a float32 model than those of transformers in bfloat16.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.engines.base import Chunk, Overhead, Retention, Usage, output_rows
from runtime.engines.fused import FusedEngine, UnbuiltEngine
from runtime.engines.native.eviction import SequenceRetention, record, together
from runtime.engines.native.parts import Parts, linears
from runtime.engines.native.pool import Pool
from runtime.engines.native.selection import WholeSequence, choose
from runtime.engines.native.storage import PageStorage, storage_of, whole_layers, windows
from runtime.engines.plain_pages import PlainPages
from runtime.kernels.cpu import library
from runtime.kernels.cpu.decoder import PAGE, Decoder, Step
from runtime.layers.compressed_linear import CompressedLinear
from runtime.layers.unrounded import behind, input_prefix
from runtime.system import processes

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine
    from runtime.kv_cache.plan import CachePlan
    from runtime.kv_cache.policy.policy import Policy


MOST_ROWS = 512
STORED_ROWS = 256  # where pages are stored in few bits: those that a step writes are plain at first


def row_tensors(chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
    """The rows of a step, as decoder.h reads them.

    Returns:
        `ids`: int64 `[rows]`. `sequence`: int32 `[rows]`, the number of its chunk. `rotary`: int64 `[rows]`, position in its sequence.
        `position`: the same without what was evicted. Only where a chunk is a tree: `slot`: int64 `[rows]`, where its keys and values are
        put. `base`, `path`: int64 `[rows]`: positions from `base` on are at `slots[path]`, `slots[path + 1]`, ...; `path` -1: all are in
        order. `slots`: int32, of all branches one after another.
    """
    slot = [c.slot + c.cached + place for c in chunks for place in range(len(c.tokens))]
    found = {
        "ids": [token for chunk in chunks for token in chunk.tokens],
        "sequence": [number for number, chunk in enumerate(chunks) for _ in chunk.tokens],
        "position": slot,
    }
    if any(chunk.parents is not None for chunk in chunks):
        position: list[int] = []
        path: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            if chunk.parents is None:
                position += range(chunk.slot, chunk.slot + len(chunk.tokens))
                path += [-1] * len(chunk.tokens)
                continue
            branches: list[list[int]] = []
            for index, parent in enumerate(chunk.parents):
                branches.append([*(branches[parent] if parent >= 0 else ()), chunk.slot + index])
            for branch in branches[chunk.cached :]:
                position.append(chunk.slot + len(branch) - 1)
                path.append(len(slots))
                slots += branch
        base = [chunk.slot for chunk in chunks for _ in chunk.tokens]
        found |= {"position": position, "slot": slot, "base": base, "path": path, "slots": slots}
    gone = [chunk.start - chunk.slot for chunk in chunks for _ in chunk.tokens]
    found["rotary"] = [place + each for place, each in zip(found["position"], gone, strict=True)]
    short = ("sequence", "slots")
    return {name: torch.tensor(each, dtype=torch.int32 if name in short else None) for name, each in found.items()}


def _split(chunks: Sequence[Chunk], leading: Sequence[int]) -> tuple[list[tuple[int, Chunk]], list[tuple[int, Chunk]]]:
    """The `leading` first tokens of each chunk, as chunks of their own, and the rest, each with the row of its first token."""
    first, rest, row = [], [], 0
    for chunk, count in zip(chunks, leading, strict=True):
        if count:
            first.append((row, replace(chunk, tokens=chunk.tokens[:count])))
        if len(chunk.tokens) > count:
            rest.append((row + count, replace(chunk, tokens=chunk.tokens[count:], start=chunk.start + count)))
        row += len(chunk.tokens)
    return first, rest


class Tables(NamedTuple):
    """Cosines and sines of so many positions, of every rotation, and their addresses."""

    positions: int
    tensors: list[torch.Tensor]
    addresses: ctypes.Array[ctypes.c_void_p]


class Ready(NamedTuple):
    """A step to be run.

    Attributes:
        step: of decoder.h.
        logits: float32 `[outputs, vocab]`, filled by it.
        x: float32 `[tokens, hidden]`, the residual stream: before it what the first layer reads, then what the last one leaves.
        tensors, tables, layouts: all that it points to.
    """

    step: Step
    logits: torch.Tensor
    x: torch.Tensor
    tensors: dict[str, torch.Tensor]
    tables: Tables
    layouts: ctypes.Array[ctypes.c_void_p]


class NativeEngine(FusedEngine):
    """See `runtime.engines.base.Engine`. Made by `take_over`."""

    page_size = PAGE
    in_memory = True  # all weights, so that the modules can compute too

    def __init__(self, torch_engine: TorchEngine | UnbuiltEngine, parts: Parts) -> None:
        found = library.load()
        assert found is not None
        super().__init__(torch_engine, parts)
        self._library = found
        self.most_rows = MOST_ROWS
        self.page_bytes = len(parts.blocks) * parts.page_numbers * parts.cache_dtype.itemsize
        self.storage: PageStorage | None = None
        self._plan: CachePlan | None = None
        self._exact = False
        self._shape = len(parts.blocks), parts.kv_heads, parts.decoder.heads
        self._windows = windows(parts.blocks)
        self._tables = Tables(0, [], (ctypes.c_void_p * 0)())
        self._local = threading.local()
        digits = "/".join(map(str, sorted(parts.digits)))
        activations = f"{digits}-digit activations" if digits else "dense"
        self.description = f"decoder in C ({found.isa_name().decode()}, {activations})"

    def explain(self) -> dict[str, str]:
        """As the modules say, but for compressed layers: here one kernel serves every number of rows."""
        found = self.torch_engine.explain()
        for name, module in self.module.named_modules():
            if isinstance(module, CompressedLinear) and module.kernel is not None:
                found[name] = module.kernel.name + module.kernel_note
        storage = self.storage
        if storage is not None:
            pages = f"pages of the decoder in C, {storage}"
            found |= {f"kv_cache.{number}": pages for number in whole_layers(self.parts.blocks)}
        return found

    @functools.cached_property
    def _modules_are_faster(self) -> bool:
        dtype, dense = self.parts.cache_dtype, library.KINDS["dense"]
        found = {
            (each.kind, each.weight_type)
            for block in self.parts.blocks
            for _, each, _ in linears(block.ops, block.count)
        }
        return dtype.itemsize == 2 and found == {(dense, library.TYPES[dtype])} and processes.multiplies(dtype)

    # ---------------------------------------------------------------- pages
    def hold(self, policy: Policy) -> str | None:
        """From now on pools hold pages as a policy says; the reason, where they cannot."""
        storage = storage_of(policy, self.parts)
        if isinstance(storage, str):
            return storage
        self.policy, self.storage, self._plan, self.prefix = policy, storage, policy.plan(), policy.prefix_tokens
        self._exact = bool(self.prefix) and bool(input_prefix(self.parts.model))
        if self.context_length is not None:
            self.context_length -= len(self.prefix)
        self.description += f", compressed cache ({policy.describe()})"
        self.page_bytes = storage.page_bytes(self.parts)
        plain = storage.plain_bytes(self.parts, self.parts.blocks) / self.page_bytes
        step = sequence = 0.0
        if plain:
            self.most_rows = STORED_ROWS
            step, sequence = STORED_ROWS // PAGE * plain, storage.recent_pages * plain
        if policy.evict is not None:
            # Queries of a step, and copies of them as they are put together; recent tokens at their old place and their new one.
            rows = policy.evict.score.window(self.most_rows)
            query = len(self.parts.blocks) * self.parts.decoder.heads * self.parts.head_dim * 4 / self.page_bytes
            step += 3 * rows * query + storage.recent_pages * plain
            sequence += min(rows, together(policy.evict)) * query
        self.overhead = Overhead(math.ceil(step), math.ceil(sequence))
        return None

    @property
    def trees(self) -> bool:  # type: ignore[override]
        """Whether chunks may be trees: all of a tree, and the page it begins in, must be among the newest tokens, which are plain."""
        return self.storage is None or self.storage.is_plain or self.storage.recent >= PAGE

    def new_pages(self, count: int, drafts: bool = False) -> Pool:
        return Pool(self.parts, count, storage=self.storage, exact=self._exact)

    def usage(self, pool: Pool, touched: int) -> Usage:
        return Usage(touched * self.page_bytes + pool.plain_bytes, *pool.reads)

    def sharing(self, pool: Pool) -> PlainPages | None:
        return pool.plain

    def make_memory(self, count: int) -> Pool:
        """As `new_pages`."""
        return self.new_pages(count)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As `Engine.logits`; of a dense 16-bit model the modules', where the CPU multiplies matrices of its dtype.

        C computes with float32 activations, the modules with rounded ones. On Zen 4 they read 512 tokens of a Llama in bfloat16 in 0.54
        of the time that C takes; in float32 it is 1.25 of it.
        """
        if self._exact:
            rows = behind(self.prefix, input_ids)
            pool = Pool(self.parts, -(-rows.shape[1] // PAGE), exact=True)
            return self._logits(rows, pool)[:, len(self.prefix) :]
        if self.in_memory and self._modules_are_faster:
            return self.torch_engine.logits(input_ids)
        return self._logits(input_ids, Pool(self.parts, -(-input_ids.shape[1] // PAGE)))

    def read(self, pool: Pool, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        return self._run(pool, chunks, output_rows(chunks, every), narrow=True)[0]

    def verify(
        self, pool: Pool, chunks: Sequence[Chunk], hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, x = self._run(pool, chunks, output_rows(chunks), narrow=not hidden)
        return logits, self.parts.normed(x) if hidden else None

    def keep(self, pool: Pool, chunk: Chunk, path: Sequence[int]) -> None:
        moves = [(index, place) for place, index in enumerate(path) if index != place]
        if moves:
            source, target = ([chunk.slot + each for each in side] for side in zip(*moves, strict=True))
            pool.copy(chunk.pages, chunk.pages, torch.tensor(source), torch.tensor(target))
        if isinstance(chunk.retention, SequenceRetention):
            chunk.retention.keep(chunk, path)

    def retention(self, prompt: int) -> SequenceRetention | WholeSequence | None:
        plan = self._plan
        if plan is not None and plan.eviction is not None:
            return SequenceRetention(plan, prompt, self._shape, self._windows)
        return None if plan is None or plan.selection is None else WholeSequence(prompt)

    def evict(self, pool: Pool, retention: Retention, pages: Sequence[int], into: Sequence[int]) -> bool:
        assert isinstance(retention, SequenceRetention)
        return retention.evict(pool, pages, into)

    def slots(self, prompt: int, new: int) -> int:
        found = self.retention(prompt)
        return super().slots(prompt, new) if found is None else found.most(new - 1)

    @torch.inference_mode()
    def _run(
        self, pool: Pool, chunks: Sequence[Chunk], outputs: Sequence[int], narrow: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of the chunks: logits of the rows `outputs`, and the residual stream after the last layer.

        With `narrow` that of other rows is not computed, and the stream not to be used. One pass, or two where sequences begin with prefix
        tokens whose inputs stay as they are: theirs comes first.
        """
        leading = [max(0, len(self.prefix) - chunk.start) for chunk in chunks]
        if pool.exact is None or not any(leading):
            return self._pass(pool, pool.decoder, chunks, outputs, narrow)
        logits = torch.empty(len(outputs), self.parts.vocabulary)
        x = torch.empty(sum(len(chunk.tokens) for chunk in chunks), self.parts.decoder.hidden)
        recorder, pool.recorder = pool.recorder, None  # records no prefix
        for decoder, parts in zip((pool.exact, pool.decoder), _split(chunks, leading), strict=True):
            rows = [row for row, chunk in parts for row in range(row, row + len(chunk.tokens))]
            places = {row: place for place, row in enumerate(rows)}
            wanted = [place for place, row in enumerate(outputs) if row in places]
            if rows:
                own = [places[outputs[place]] for place in wanted]
                pool.recorder = None if decoder is pool.exact else recorder
                logits[wanted], x[rows] = self._pass(pool, decoder, [chunk for _, chunk in parts], own, narrow)
        return logits, x

    def _pass(
        self, pool: Pool, decoder: Decoder, chunks: Sequence[Chunk], outputs: Sequence[int], narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_run`, in one pass of a decoder of the pool."""
        ready = self.prepare(decoder, chunks, outputs)
        recorder, pool.recorder = pool.recorder, None
        if recorder is not None:
            states = torch.empty(len(self.parts.blocks), *ready.x.shape)
            ready.step.record = states.data_ptr()
        ready.step.narrow = narrow and recorder is None
        for chunk in chunks:  # while pages are as the queries have seen them that are added up
            if isinstance(chunk.retention, SequenceRetention):
                chunk.retention.settle(pool, chunk.pages, chunk.start)
        stored = pool.begin(ready.step, chunks)  # what the step points to
        observed = record(ready.step, chunks, self._shape, self.parts.head_dim)
        rule = None if self.storage is None else self.storage.select
        reading = None if rule is None else choose(ready.step, ready.tensors, chunks, rule, self.parts.kv_heads)
        if reading is not None:
            pool.count_reads(reading.held, reading.read)
        self.compute(ready.step, pool)
        for (retention, chunk), queries in zip(observed.chunks, observed.queries, strict=True):
            retention.remember(chunk, queries)
        if stored is not None:
            pool.check()
        if recorder is not None:
            recorder.fill(chunks, states)
        return ready.logits, ready.x

    def prepare(
        self, decoder: Decoder, chunks: Sequence[Chunk], outputs: Sequence[int], x: torch.Tensor | None = None
    ) -> Ready:
        """A step of all layers of a decoder, to be run in the same thread before the next is prepared.

        Args:
            decoder: a pool's, or of a part of it.
            chunks: at least one token.
            outputs: rows whose logits are wanted.
            x: float32 `[tokens, hidden]`, contiguous, what the first layer reads; it is overwritten. None: the tokens' embeddings.
        """
        tensors = row_tensors(chunks)
        ids = tensors.pop("ids")
        end = max(chunk.start + chunk.cached + len(chunk.tokens) for chunk in chunks)
        width = max(len(chunk.pages) for chunk in chunks)
        pages = [[*chunk.pages, *[0] * (width - len(chunk.pages))] for chunk in chunks]
        tensors["pages"] = torch.tensor(pages, dtype=torch.int32)
        # A lookup is a tensor of its own: C may overwrite it.
        tensors["x"] = self.parts.embed(ids, tensors["rotary"]) if x is None else x
        tensors["output"] = torch.tensor(list(outputs), dtype=torch.int32)
        tensors["logits"] = torch.empty(len(outputs), self.parts.vocabulary)
        tensors["memory"] = self._memory(decoder, ids.numel())
        tables = self._rotations(end)
        ragged = [
            chunk.retention.ragged if isinstance(chunk.retention, SequenceRetention) else None for chunk in chunks
        ]
        addresses = [None if each is None else ctypes.addressof(each.ragged) for each in ragged]
        layouts = (ctypes.c_void_p * len(chunks))(*addresses)
        step = Step(
            rows=ids.numel(),
            outputs=len(outputs),
            pages_stride=width,
            first=0,
            last=decoder.layers,
            decoder=ctypes.pointer(decoder),
            tables=ctypes.addressof(tables.addresses),
            ragged=ctypes.addressof(layouts) if any(ragged) else None,
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )
        return Ready(step, tensors["logits"], tensors["x"], tensors, tables, layouts)

    def compute(self, step: Step, pool: Pool | None = None) -> None:
        """Run a prepared step; the pool is what engines look up that do not have all weights in memory."""
        self._library.decoder_step(ctypes.byref(step), torch.get_num_threads())

    def _memory(self, decoder: Decoder, rows: int) -> torch.Tensor:
        """Scratch memory of this thread, reused by its next step."""
        wanted = self._library.decoder_memory(ctypes.byref(decoder), rows)
        memory = getattr(self._local, "memory", None)
        if memory is None or memory.numel() < wanted:
            memory = self._local.memory = torch.empty(wanted, dtype=torch.uint8)
        return memory

    def _rotations(self, positions: int) -> Tables:
        """Of so many positions or more."""
        found = self._tables
        if found.positions < positions:
            count = max(256, 1 << (positions - 1).bit_length())
            tables = self.parts.rotation(count)
            addresses = (ctypes.c_void_p * len(tables))(*(each.data_ptr() for each in tables))
            found = self._tables = Tables(count, tables, addresses)
        return found
