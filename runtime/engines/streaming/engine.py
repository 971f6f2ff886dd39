"""Engines of models that are larger than the memory they may take: blocks stream from disk while others compute."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.base import Chunk, Engine
from runtime.engines.blueprint import Blueprint
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.parts import Parts, linears
from runtime.engines.native.pool import Pool
from runtime.engines.native.take_over import leave, read_engine
from runtime.engines.streaming.plan import Plan, cache_budget, plan, reserve_for
from runtime.engines.streaming.prepared_file import Group, Place, PreparedFile, put, share, values
from runtime.engines.streaming.ring import DeviceSlots, HostSlots, RangeReader, Ring, Slots, aligned
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError
from runtime.kernels.cpu.decoder import OPS, Block, Op, Step
from runtime.modeling.weights import to_device
from runtime.system.memory import free_bytes

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy


Values = list[tuple[Place, torch.Tensor]]


class _Streamed:
    """Base class: an engine of which some blocks come out of a ring. Threads that call at once wait for one another.

    Attributes:
        weight_bytes: that the weights in memory take, and the buffers of the ring.
    """

    def _stream(self, ring: Ring, weight_bytes: int) -> None:
        self.ring, self.weight_bytes = ring, weight_bytes
        self._lock = threading.RLock()

    def close(self) -> None:
        """Stop reading and free the buffers; the model cannot compute any more."""
        with self._lock:
            self.ring.close()


class StreamedTorch(_Streamed, TorchEngine):
    """`TorchEngine` whose blocks `moving` come out of a ring: around its forward pass a block's parameters and buffers are views of a ring
    buffer, between passes of the mapped file, which nobody reads.
    """

    def __init__(
        self, module: Any, device: torch.device, file: PreparedFile, moving: dict[int, Group], ring: Ring, weights: int
    ) -> None:
        super().__init__(module, device)
        self._stream(ring, weights)
        held: list[int] = []  # the slot of the block that is being computed

        def enter(number: int, views: list[Values], block: nn.Module, arguments: Any) -> None:
            held.append(ring.take(number))
            put(views[held[0]])

        def leave(views: list[Values], block: nn.Module, arguments: Any, result: Any) -> None:
            if held:  # `enter` may have failed
                put(views[-1])
                ring.give(held.pop())

        for number, group in moving.items():
            # What its modules hold while it is in each buffer, and last what they hold otherwise.
            views = [values(module, file.tensors(group, buffer)) for buffer in (*ring.slots.buffers, None)]
            block = module.get_submodule(group.name)
            block.register_forward_pre_hook(partial(enter, number, views))
            block.register_forward_hook(partial(leave, views), always_call=True)

    @torch.inference_mode()
    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self._lock:
            self.ring.restart()
            return super().forward(*arguments, **named)


_PINNED_SHARE = 0.5  # of the free main memory, for blocks on their way to a GPU


def streamed(
    blueprint: Blueprint,
    file: PreparedFile,
    max_memory: int,
    whole: Callable[[TorchEngine, Blueprint, Policy | None], Engine],
    policy: Policy | None = None,
    why_modules: str | None = None,
) -> Engine:
    """The engine for a skeleton and its prepared file within `max_memory` bytes; with a policy its cache is compressed.

    What stays is read into memory of this process, not mapped: the bound is known, and a file that shrinks is an error.

    Args:
        whole: chooses the engine where no block has to be streamed.
        why_modules: the reason why transformers' modules compute; None: the decoder in C may.

    Raises:
        RequestError: not even two blocks fit at a time.
    """
    outside, *blocks = file.groups
    model, device = blueprint.module, blueprint.device
    config, dtype = model.config, blueprint.dtype
    decided = plan(max_memory, outside.size, [group.size for group in blocks], reserve_for(config, dtype))
    _settle(model, file, [outside, *(g for i, g in enumerate(blocks) if i not in decided.streamed)], device)
    moving = {i: blocks[i] for i in decided.streamed}
    for group in moving.values():
        put(values(model, file.tensors(group)))
    share(model, file.contents.aliases)
    to_device(model, device)
    engine = (
        _streaming(blueprint, file, decided, policy, why_modules)
        if moving
        else whole(TorchEngine(model, device), blueprint, policy)
    )
    engine.cache_budget = cache_budget(max_memory, decided.bytes, config, dtype)
    return engine


def _streaming(
    blueprint: Blueprint, file: PreparedFile, decided: Plan, policy: Policy | None, why_modules: str | None
) -> Engine:
    """The engine whose blocks come out of a ring: the decoder in C where it fits."""
    blocks, model, device = file.groups[1:], blueprint.module, blueprint.device
    moving = {i: blocks[i] for i in decided.streamed}
    ring = Ring(_slots(file, blocks, decided, device), decided.streamed)
    try:
        found: NativeEngine | str = why_modules or ""
        ranges: dict[int, range] = {}
        if why_modules is None:
            base = torch.frombuffer(file.mapped(), dtype=torch.uint8).data_ptr()
            ranges = {i: range(base + group.begin, base + group.end) for i, group in moving.items()}
            found = read_engine(TorchEngine(model, device), policy)
        if not isinstance(found, str):
            found = _why_not_streamed(found.parts, ranges) or found
        if not isinstance(found, str):
            file.forget()  # the pages that were looked at (norms, biases) are copied where they are needed
            native = StreamedNative(TorchEngine(model, device), found.parts, ranges, ring, decided.bytes)
            if policy is not None:
                native.hold(policy)
            return native
        engine = StreamedTorch(model, device, file, moving, ring, decided.bytes)
        if why_modules is None:
            leave(engine, found)
        elif policy is not None:
            engine.why_modules = why_modules
        if policy is not None:
            engine.compress_cache(policy)
        return engine
    except BaseException:
        ring.close()
        raise


def _why_not_streamed(parts: Parts, ranges: Mapping[int, range]) -> str | None:
    """Why the decoder in C cannot compute on a ring's buffers: weights lie in the file otherwise than it reads them."""
    for number, addresses in ranges.items():
        block = parts.blocks[number]
        if any(linear.weight not in addresses for _, linear, _ in linears(block.ops, block.count)):
            return "matrices of its streamed layers lie transposed in the file"
    return None


def _settle(model: Any, file: PreparedFile, groups: list[Group], device: torch.device) -> None:
    """Read groups into memory for good."""
    reader = RangeReader(file.path)
    try:
        for group in groups:
            memory = aligned(group.size)
            reader.read(memory, group.begin, group.size)
            tensors = file.tensors(group, torch.frombuffer(memory, dtype=torch.uint8))
            put(values(model, {name: value.to(device) for name, value in tensors.items()}))
    finally:
        reader.close()


def _slots(file: PreparedFile, blocks: list[Group], decided: Plan, device: torch.device) -> Slots:
    if device.type == "cpu":
        return HostSlots(file, blocks, decided.buffers)
    if device.type != "cuda":
        raise RequestError(f"max_memory is for CPUs and CUDA GPUs, not {device.type}")
    wanted = sum(blocks[i].size for i in decided.streamed)
    pinned = wanted <= _PINNED_SHARE * free_bytes()
    return DeviceSlots(file, blocks, decided.streamed, decided.buffers, device, pinned)


class StreamedNative(_Streamed, NativeEngine):
    """`NativeEngine` of which some blocks come out of a ring: C runs some layers at a time, on the addresses of the buffer that has them.

    Args:
        ranges: of each of these blocks, the addresses at which `parts` has its tensors.
        weights: bytes that all weights take.
    """

    in_memory = False

    def __init__(
        self, engine: TorchEngine, parts: Parts, ranges: Mapping[int, range], ring: Ring, weights: int
    ) -> None:
        super().__init__(engine, parts)
        self._stream(ring, weights)
        # Of each streamed block, where its operations have addresses of tensors, and how far these are from the block's begin.
        self._moves = {
            number: [
                (place, address - addresses.start, shared)
                for place, address, shared in _addresses(parts.blocks[number])
                if address in addresses
            ]
            for number, addresses in ranges.items()
        }
        count = len(parts.blocks)
        self._runs = list(pairwise(sorted({0, count, *ranges, *(number + 1 for number in ranges)})))

    def _run(
        self, pool: Pool, chunks: Sequence[Chunk], outputs: Sequence[int], narrow: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            return super()._run(pool, chunks, outputs, narrow)

    def compute(self, step: Step, pool: Pool | None = None) -> None:
        assert pool is not None, "of a whole model"
        outputs, step.outputs = step.outputs, 0
        self.ring.restart()
        for first, last in self._runs:
            step.first, step.last = first, last
            if last == len(self.parts.blocks):
                step.outputs = outputs
            if first not in self._moves:
                super().compute(step, pool)
                continue
            with self.ring.block(first) as slot:
                at = ctypes.addressof(step.decoder.contents.blocks[first].ops.contents)
                base = self.ring.slots.buffers[slot].data_ptr()
                for place, distance, shared in self._moves[first]:
                    ctypes.c_void_p.from_address(place if shared else at + place).value = base + distance
                super().compute(step, pool)


def _addresses(block: Block) -> Iterator[tuple[int, int, bool]]:
    """Where every address of a weight in a block's operations is, and its value.

    A place is an offset from the operations, which every pool has its own copy of, or with `shared` an address: routers and experts are
    there once.
    """
    for number in range(block.count):
        op = block.ops[number]
        kind = OPS[op.kind]
        field = getattr(Op, kind, None)  # of those that have weights
        if kind == "mixture":
            experts = op.mixture.experts.contents
            for each in (op.mixture.router.contents, *(experts.expert[i] for i in range(experts.count))):
                yield from ((place, value, True) for place, value in _within(each, ctypes.addressof(each)))
        elif field is not None and kind not in ("gate", "cap"):
            found = _within(getattr(op, kind), number * ctypes.sizeof(Op) + field.offset)
            yield from ((place, value, False) for place, value in found)


def _within(structure: ctypes.Structure, at: int) -> Iterator[tuple[int, int]]:
    for name, kind in structure._fields_:  # type: ignore[misc]
        value, place = getattr(structure, name), at + getattr(type(structure), name).offset
        if issubclass(kind, ctypes.Structure):
            yield from _within(value, place)
        elif kind is ctypes.c_void_p and value is not None:
            yield place, value
