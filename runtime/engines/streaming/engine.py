"""Engines of models that are larger than the memory they may take: blocks stream from disk while others compute."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.base import Chunk, Engine
from runtime.engines.native.engine import LlamaEngine, Pool
from runtime.engines.native.parts import Parts
from runtime.engines.streaming.plan import Plan, cache_budget, plan, reserve_for
from runtime.engines.streaming.prepared_file import Group, PreparedFile, groups_of, places, put, share
from runtime.engines.streaming.ring import DeviceSlots, HostSlots, RangeReader, Ring, aligned
from runtime.engines.torch.engine import Blueprint, TorchEngine
from runtime.errors import RequestError
from runtime.kernels.cpu.decoder import Block, Step
from runtime.modeling.skeleton import tied_names
from runtime.modeling.weights import to_device
from runtime.system.memory import free_bytes

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy


# Any transformers model with streamed blocks: around its forward pass a block's parameters and buffers are views of a ring buffer.

_Values = list[tuple[dict[str, Any], str, torch.Tensor]]


class StreamedTorch(TorchEngine):
    """`TorchEngine` whose blocks `order` come out of a ring; between passes they are views of the mapped file, which nobody reads.

    Threads that call at once wait for one another.
    """

    def __init__(self, module: Any, device: torch.device, blocks: BlockViews, ring: Ring, held: int) -> None:
        super().__init__(module, device)
        self.weight_bytes = held
        self.ring = ring
        self._lock = threading.RLock()
        for number, name in blocks.names.items():
            swap = _Swap(blocks, ring, number)
            block = module.get_submodule(name)
            block.register_forward_pre_hook(swap.enter)
            block.register_forward_hook(swap.leave, always_call=True)

    @torch.inference_mode()
    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self._lock:
            self.ring.restart()
            return super().forward(*arguments, **named)

    def close(self) -> None:
        """Stop reading and free the buffers; the model cannot compute any more."""
        with self._lock:
            self.ring.close()


class BlockViews:
    """For each streamed block and ring buffer, what the block's modules hold while it is there. `names`: {block: module}."""

    def __init__(
        self, model: nn.Module, file: PreparedFile, groups: dict[int, Group], buffers: list[torch.Tensor]
    ) -> None:
        self.names = {number: group.name for number, group in groups.items()}
        self._model, self._file, self._groups, self._buffers = model, file, groups, buffers
        self._idle = {number: self._places(file.tensors(group)) for number, group in groups.items()}
        self._made: dict[tuple[int, int], _Values] = {}

    def show(self, number: int, slot: int | None) -> None:
        """Let the block's modules see a buffer, or (None) the file."""
        if slot is None:
            values = self._idle[number]
        else:
            values = self._made.get((number, slot)) or self._make(number, slot)
        for owner, leaf, value in values:
            owner[leaf] = value

    def _make(self, number: int, slot: int) -> _Values:
        with torch.inference_mode(False):
            made = self._places(self._file.tensors(self._groups[number], self._buffers[slot]))
        self._made[number, slot] = made
        return made

    def _places(self, tensors: dict[str, torch.Tensor]) -> _Values:
        result: _Values = []
        for name, value in tensors.items():
            owner_name, _, leaf = name.rpartition(".")
            owner = self._model.get_submodule(owner_name)
            if leaf in owner._parameters:
                result.append((owner._parameters, leaf, nn.Parameter(value, requires_grad=False)))
            else:
                result.append((owner._buffers, leaf, value))
        return result


class _Swap:
    """The hooks of one block."""

    def __init__(self, blocks: BlockViews, ring: Ring, number: int) -> None:
        self._blocks, self._ring, self._number = blocks, ring, number
        self._slot: int | None = None

    def enter(self, module: nn.Module, arguments: Any) -> None:
        self._slot = self._ring.take(self._number)
        self._blocks.show(self._number, self._slot)

    def leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:  # None: `enter` failed
            self._blocks.show(self._number, None)
            self._ring.give(slot)


_PINNED_SHARE = 0.5  # of the free main memory, for blocks on their way to a GPU


def streamed(
    blueprint: Blueprint,
    file: PreparedFile,
    max_memory: int,
    whole: Callable[[TorchEngine, Blueprint, Policy | None], Engine],
    policy: Policy | None = None,
) -> Engine:
    """The engine for a skeleton and its prepared file within `max_memory` bytes; with a policy its cache is compressed.

    What stays is read into memory of this process, not mapped: the bound is known, and a file that shrinks is an error.

    Args:
        whole: chooses the engine where no block has to be streamed.

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
        put(model, file.tensors(group))
    share(model, file.contents.aliases)
    to_device(model, device)
    engine = (
        _streaming(blueprint, file, decided, policy) if moving else whole(TorchEngine(model, device), blueprint, policy)
    )
    engine.cache_budget = cache_budget(max_memory, decided.bytes, config, dtype)
    return engine


def _streaming(blueprint: Blueprint, file: PreparedFile, decided: Plan, policy: Policy | None) -> Engine:
    """The engine whose blocks come out of a ring: the decoder in C where it fits."""
    blocks, model, device = file.groups[1:], blueprint.module, blueprint.device
    moving = {i: blocks[i] for i in decided.streamed}
    slots = _slots(file, blocks, decided, device)
    ring = Ring(slots, decided.streamed)
    try:
        fitting = _native(blueprint, file, moving, slots, ring, decided) if policy is None else None
        if fitting is not None:
            return fitting
        engine = StreamedTorch(model, device, BlockViews(model, file, moving, slots.buffers), ring, decided.bytes)
        if policy is not None:
            engine.compress_cache(policy)
        return engine
    except BaseException:
        ring.close()
        raise


def refuse_early(blueprint: Blueprint, max_memory: int) -> None:
    """RequestError where the bound is too little by far, before a large file is made to find out exactly."""
    groups = groups_of(blueprint.module)
    sizes = dict.fromkeys(groups.all(), 0)
    tied = tied_names(blueprint.module)
    for place in places(blueprint.module):
        if place.name not in tied:
            width = min(place.value.itemsize, blueprint.dtype.itemsize) if place.value.is_floating_point() else 0
            sizes[groups.of(place.name)] += place.value.numel() * (width or place.value.itemsize)
    outside, *blocks = sizes.values()
    plan(max_memory, outside, blocks, reserve_for(blueprint.module.config, blueprint.dtype))


def _settle(model: Any, file: PreparedFile, groups: list[Group], device: torch.device) -> None:
    """Read groups into memory for good."""
    reader = RangeReader(file.path)
    try:
        for group in groups:
            memory = aligned(group.size)
            reader.read(memory, group.begin, group.size)
            tensors = file.tensors(group, torch.frombuffer(memory, dtype=torch.uint8)) if group.size else {}
            put(model, {name: value.to(device) for name, value in tensors.items()})
    finally:
        reader.close()


def _slots(file: PreparedFile, blocks: list[Group], decided: Plan, device: torch.device) -> HostSlots | DeviceSlots:
    if device.type == "cpu":
        return HostSlots(file, blocks, decided.buffers)
    if device.type != "cuda":
        raise RequestError(f"max_memory is for CPUs and CUDA GPUs, not {device.type}")
    wanted = sum(blocks[i].size for i in decided.streamed)
    pinned = wanted <= _PINNED_SHARE * free_bytes()
    return DeviceSlots(file, blocks, decided.streamed, decided.buffers, device, pinned)


def _native(
    blueprint: Blueprint,
    file: PreparedFile,
    moving: dict[int, Group],
    slots: HostSlots | DeviceSlots,
    ring: Ring,
    decided: Plan,
) -> Engine | None:
    """The decoder in C, where it fits."""
    if blueprint.device.type != "cpu" or not blueprint.compressed or blueprint.kernels == "reference":
        return None
    from runtime.engines.native.parts import Parts, read_parts

    parts = read_parts(blueprint.module, blueprint.device)
    if not isinstance(parts, Parts):
        return None
    file.forget()  # the pages that were looked at (norms, biases) are copied where they are needed
    base = torch.frombuffer(file.mapped(), dtype=torch.uint8).data_ptr()
    moves = {i: Moves(parts.blocks[i], base + group.begin, group.size) for i, group in moving.items()}
    engine = TorchEngine(blueprint.module, blueprint.device)
    return StreamedLlama(engine, parts, moves, ring, slots.buffers, decided.bytes)


# The native engine with streamed blocks: C runs some layers at a time, on the addresses of the buffer that holds them.


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

    def _run(self, pool: Pool, pieces: Sequence[Chunk], outputs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
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
