"""Native CPU engine: a decoder whose whole step runs in C, as a program of typed operations, with a paged KV cache.

It takes over a transformers model (the same weights, nothing is copied) where every part of its forward pass is an operation that
program.h knows; `read_parts` says what is missing otherwise, and the torch engine runs the model instead. The residual stream, norms
and attention are float32, so its numbers are closer to a float32 model than those of transformers in bfloat16.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.engines.base import Chunk, output_rows
from runtime.engines.fused import FusedEngine
from runtime.engines.native.parts import Parts, read_parts
from runtime.engines.native.pool import Pool
from runtime.engines.native.proof import disproof
from runtime.kernels.cpu import library
from runtime.kernels.cpu.decoder import PAGE, Decoder, Step
from runtime.layers.compressed_linear import CompressedLinear

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine


MOST_ROWS = 512
_log = logging.getLogger("compress.engine")


def row_tensors(chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
    """The rows of a step, as decoder.h reads them.

    Returns:
        `ids`: int64 `[rows]`. `sequence`: int32 `[rows]`, the number of its chunk. `position`: int64 `[rows]`, in its sequence. Only
        where a chunk is a tree: `slot`: int64 `[rows]`, where its keys and values are put. `base`, `path`: int64 `[rows]`: positions
        from `base` on are at `slots[path]`, `slots[path + 1]`, ...; `path` -1: all are in order. `slots`: int32, of all branches one
        after another.
    """
    slot = [c.start + c.cached + place for c in chunks for place in range(len(c.tokens))]
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
                position += range(chunk.start, chunk.start + len(chunk.tokens))
                path += [-1] * len(chunk.tokens)
                continue
            branches: list[list[int]] = []
            for index, parent in enumerate(chunk.parents):
                branches.append([*(branches[parent] if parent >= 0 else ()), chunk.start + index])
            for branch in branches[chunk.cached :]:
                position.append(chunk.start + len(branch) - 1)
                path.append(len(slots))
                slots += branch
        base = [chunk.start for chunk in chunks for _ in chunk.tokens]
        found |= {"position": position, "slot": slot, "base": base, "path": path, "slots": slots}
    short = ("sequence", "slots")
    return {name: torch.tensor(each, dtype=torch.int32 if name in short else None) for name, each in found.items()}


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
        tensors, tables: all that it points to.
    """

    step: Step
    logits: torch.Tensor
    x: torch.Tensor
    tensors: dict[str, torch.Tensor]
    tables: Tables


class LlamaEngine(FusedEngine):
    """See `runtime.engines.base.Engine`. Made by `take_over`."""

    page_size = PAGE
    trees = True

    def __init__(self, torch_engine: TorchEngine, parts: Parts) -> None:
        found = library.load()
        assert found is not None
        super().__init__(torch_engine, parts)
        self._library = found
        self.most_rows = MOST_ROWS
        self.page_bytes = (
            len(parts.blocks) * parts.kv_heads * (parts.head_dim + parts.value_dim) * PAGE * parts.cache_dtype.itemsize
        )
        self._tables = Tables(0, [], (ctypes.c_void_p * 0)())
        self._local = threading.local()
        digits = parts.decoder.digits
        activations = f"{digits}-digit activations" if parts.digits else "dense"
        self.description = f"decoder in C ({found.isa_name().decode()}, {activations})"

    def explain(self) -> dict[str, str]:
        """As the modules say, but for compressed layers: here one kernel serves every number of rows."""
        found = self.torch_engine.explain()
        for name, module in self.module.named_modules():
            if isinstance(module, CompressedLinear) and module.kernel is not None:
                found[name] = module.kernel.name
        return found

    # ---------------------------------------------------------------- pages
    def new_pages(self, count: int, drafts: bool = False) -> Pool:
        return Pool(self.parts, count)

    def make_memory(self, count: int) -> Pool:
        """As `new_pages`."""
        return self.new_pages(count)

    def read(self, pool: Pool, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        return self._run(pool, chunks, output_rows(chunks, every))[0]

    def verify(
        self, pool: Pool, chunks: Sequence[Chunk], hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, x = self._run(pool, chunks, output_rows(chunks))
        return logits, self.parts.normed(x) if hidden else None

    def keep(self, pool: Pool, chunk: Chunk, path: Sequence[int]) -> None:
        moves = [(index, place) for place, index in enumerate(path) if index != place]
        if moves:
            source, target = (torch.tensor([chunk.start + each for each in side]) for side in zip(*moves, strict=True))
            pages = torch.tensor(chunk.pages, dtype=torch.int32)
            self._library.decoder_copy(
                ctypes.byref(pool.decoder), pages.data_ptr(), len(moves), source.data_ptr(), target.data_ptr()
            )

    @torch.inference_mode()
    def _run(self, pool: Pool, chunks: Sequence[Chunk], outputs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over all tokens of the chunks: logits of the rows `outputs`, and the residual stream after the last layer."""
        ready = self.prepare(pool.decoder, chunks, outputs)
        recorder, pool.recorder = pool.recorder, None
        if recorder is not None:
            states = torch.empty(len(self.parts.blocks), *ready.x.shape)
            ready.step.record = states.data_ptr()
        self.compute(ready.step, pool)
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
        tensors["x"] = self.parts.embed(ids, tensors["position"]) if x is None else x
        tensors["output"] = torch.tensor(list(outputs), dtype=torch.int32)
        tensors["logits"] = torch.empty(len(outputs), self.parts.vocabulary)
        tensors["memory"] = self._memory(decoder, ids.numel())
        tables = self._rotations(end)
        step = Step(
            rows=ids.numel(),
            outputs=len(outputs),
            pages_stride=width,
            first=0,
            last=decoder.layers,
            decoder=ctypes.pointer(decoder),
            tables=ctypes.addressof(tables.addresses),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )
        return Ready(step, tensors["logits"], tensors["x"], tensors, tables)

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
        """Of so many positions or more, from the model's own rotary modules."""
        found = self._tables
        if found.positions < positions:
            count = max(256, 1 << (positions - 1).bit_length())
            tables = self.parts.rotation(count)
            addresses = (ctypes.c_void_p * len(tables))(*(each.data_ptr() for each in tables))
            found = self._tables = Tables(count, tables, addresses)
        return found


def take_over(engine: TorchEngine) -> LlamaEngine | None:
    """The native engine for this model, or None where it does not fit; the log and the engine's `explain` say why."""
    found = read_engine(engine)
    if isinstance(found, LlamaEngine):
        return found
    leave(engine, found)
    return None


def read_engine(engine: TorchEngine) -> LlamaEngine | str:
    """The native engine, if it knows the model and computes a probe as the modules do; otherwise the reason."""
    parts = read_parts(engine.module, engine.device)
    if isinstance(parts, str):
        return parts
    found = LlamaEngine(engine, parts)
    return disproof(found) or found


def leave(engine: TorchEngine, reason: str) -> None:
    """Say why transformers' modules compute a model."""
    _log.info("transformers computes this model, not the decoder in C: %s", reason)
    engine.why_modules = f"not the decoder in C: {reason}"


__all__ = ["LlamaEngine", "leave", "read_engine", "take_over"]
