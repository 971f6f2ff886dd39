"""Native CPU engine: a decoder whose whole step runs in C, as a program of typed operations, with a paged KV cache.

It takes over a transformers model (the same weights, nothing is copied) where every part of its forward pass is an operation that
program.h knows; `read_parts` says what is missing otherwise, and the torch engine runs the model instead. The residual stream, norms
and attention are float32, so its numbers are closer to a float32 model than those of transformers in bfloat16.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from runtime.engines.base import Beside, Chunk, Usage, output_rows
from runtime.engines.fused import FusedEngine, UnbuiltEngine
from runtime.engines.native.parts import Parts, linears, read_parts
from runtime.engines.native.pool import PlainPages, Pool
from runtime.engines.native.storage import PageStorage, storage_of, whole_layers
from runtime.engines.program.operations import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.decoder import PAGE, Decoder, Step
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import processes

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine
    from runtime.kv_cache.policy.policy import Policy


MOST_ROWS = 512
STORED_ROWS = 256  # where pages are stored in few bits: those that a step writes are plain at first
PROBE = 12  # tokens; the last three are read one by one
# The largest relative error that rounding explains: of modules that compute in a dtype, and of activations in one digit.
_ERRORS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_DIGIT_ERROR = 0.2
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
        self.page_bytes = (
            len(parts.blocks) * parts.kv_heads * (parts.head_dim + parts.value_dim) * PAGE * parts.cache_dtype.itemsize
        )
        self.storage: PageStorage | None = None
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
        self.policy, self.storage = policy, storage
        self.description += f", compressed cache ({policy.describe()})"
        if not storage.is_plain:
            parts = self.parts
            self.page_bytes = storage.page_bytes(parts)
            self.most_rows = STORED_ROWS
            plain = storage.plain_bytes(parts, parts.blocks) / self.page_bytes
            self.beside = Beside(math.ceil(STORED_ROWS // PAGE * plain), math.ceil(storage.recent_pages * plain))
        return None

    @property
    def trees(self) -> bool:  # type: ignore[override]
        """Whether chunks may be trees: all of a tree, and the page it begins in, must be among the newest tokens, which are plain."""
        return self.storage is None or self.storage.is_plain or self.storage.recent >= PAGE

    def new_pages(self, count: int, drafts: bool = False) -> Pool:
        return Pool(self.parts, count, storage=self.storage)

    def usage(self, pool: Pool, touched: int) -> Usage:
        return Usage(touched * self.page_bytes + pool.plain_bytes)

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
        if self.in_memory and self._modules_are_faster:
            return self.torch_engine.logits(input_ids)
        return self._logits(input_ids, Pool(self.parts, -(-input_ids.shape[1] // PAGE)))

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
        stored = pool.begin(ready.step, chunks)  # what the step points to
        self.compute(ready.step, pool)
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


def take_over(engine: TorchEngine, policy: Policy | None = None) -> NativeEngine | None:
    """The native engine for this model and its cache, or None where it does not fit; the log and the engine's `explain` say why."""
    found = read_engine(engine, policy)
    if isinstance(found, NativeEngine):
        return found
    leave(engine, found)
    return None


def read_engine(engine: TorchEngine, policy: Policy | None = None) -> NativeEngine | str:
    """The native engine, if it knows the model, holds its cache so and computes a probe as the modules do; otherwise the reason."""
    parts = read_parts(engine.module, engine.device)
    if isinstance(parts, str):
        return parts
    found = NativeEngine(engine, parts)
    reason = None if policy is None else found.hold(policy)
    return reason or disproof(found) or found


def leave(engine: TorchEngine, reason: str) -> None:
    """Say why transformers' modules compute a model."""
    _log.info("transformers computes this model, not the decoder in C: %s", reason)
    engine.why_modules = f"not the decoder in C: {reason}"


# ---------------------------------------------------------------- proof on a probe
def disproof(engine: NativeEngine) -> str | None:
    """How the engine and the modules that it took over differ in their logits; None: they agree."""
    parts, model = engine.parts, engine.module
    names = [parts.program.layers[i].name for i in kinds(parts)]
    try:
        with torch.inference_mode(), _only(model, names):
            wanted = model(input_ids=torch.tensor([_probe_ids(engine)]), use_cache=False).logits[0].float()
    except Exception as error:  # whatever code of models raises
        return f"transformers' modules do not compute a probe: {error}"
    return _difference(probe(engine), wanted, parts)


def _probe_ids(engine: NativeEngine) -> list[int]:
    most = min(engine.parts.vocabulary, engine.vocab_size)
    return torch.randint(0, most, (PROBE,), generator=torch.Generator().manual_seed(0)).tolist()


def probe(engine: NativeEngine) -> torch.Tensor:
    """Logits of the probe by one layer of each kind, float32 `[PROBE, vocab]`."""
    parts, text, found = engine.parts, _probe_ids(engine), []
    pool = Pool(parts, 1, [parts.blocks[i] for i in kinds(parts)])
    for start, end in ((0, PROBE - 3), (PROBE - 3, PROBE - 2), (PROBE - 2, PROBE - 1), (PROBE - 1, PROBE)):
        ready = engine.prepare(pool.decoder, [Chunk(text[start:end], start, (0,))], range(end - start))
        engine.compute(ready.step)
        found.append(ready.logits)
    return torch.cat(found)


def _difference(found: torch.Tensor, wanted: torch.Tensor, parts: Parts) -> str | None:
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return "its logits on a probe are finite elsewhere than those of transformers' modules"
    found, wanted = found.where(finite, 0.0), wanted.where(finite, 0.0)
    error = float((found - wanted).norm() / (wanted.norm() + 1e-30))
    most = max(_ERRORS[parts.cache_dtype], _DIGIT_ERROR if parts.decoder.digits == 1 and parts.digits else 0.0)
    if error <= most:
        return None
    return f"its logits on a probe differ by {error:.2g} from those of transformers' modules, and rounding explains {most:g}"


def kinds(parts: Parts) -> list[int]:
    """The first layer of each kind: of the same operations on weights of the same shapes and representations, experts' too."""
    found: dict[Any, int] = {}
    for number, (layer, block) in enumerate(zip(parts.program.layers, parts.blocks, strict=True)):
        shapes = tuple(
            (each.kind, each.weight_type, each.scale_type, each.group, each.rows, each.columns, bool(each.zero))
            for _, each, _ in linears(block.ops, block.count)
        )
        found.setdefault((_nameless(layer), shapes), number)
    return list(found.values())


def _nameless(layer: Layer) -> tuple[Any, ...]:
    """Its operations, modules by their names within it."""
    prefix = f"{layer.name}."

    def local(value: Any) -> Any:
        if isinstance(value, str):
            return value.removeprefix(prefix)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{each.name: local(getattr(value, each.name)) for each in fields(value)})
        return value

    return tuple(local(operation) for operation in layer.operations)


@contextmanager
def _only(model: nn.Module, names: list[str]) -> Iterator[None]:
    """The model with no other layers than these: the others pass on what they read."""
    blocks: Any = model.get_submodule(names[0].rpartition(".")[0])
    chosen = {model.get_submodule(name) for name in names}
    tuples = False

    def note(module: Any, given: Any, result: Any) -> None:
        nonlocal tuples
        tuples = isinstance(result, tuple)

    def skip(hidden: torch.Tensor | None = None, *_: Any, hidden_states: torch.Tensor | None = None, **__: Any) -> Any:
        passed = hidden if hidden is not None else hidden_states
        return (passed,) if tuples else passed

    with ExitStack() as stack:
        stack.callback(blocks[0].register_forward_hook(note).remove)  # the first of its kind, so it is never skipped
        for module in blocks:
            if module not in chosen:
                module.__dict__["forward"] = skip
                stack.callback(functools.partial(module.__dict__.pop, "forward"))
        yield


__all__ = ["NativeEngine", "leave", "probe", "read_engine", "take_over"]
