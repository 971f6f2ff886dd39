"""An engine for a model that is larger than the memory it may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.engines.base import Engine
from runtime.engines.choose import lean
from runtime.engines.torch import Blueprint, TorchEngine
from runtime.errors import RequestError
from runtime.memory import free_bytes
from runtime.skeleton import tied_names
from runtime.streaming.file import Group, PreparedFile
from runtime.streaming.groups import groups_of, places, put, share
from runtime.streaming.hooks import BlockViews, StreamedTorch
from runtime.streaming.plan import Plan, cache_budget, plan, reserve_for
from runtime.streaming.reader import RangeReader, aligned
from runtime.streaming.ring import Ring
from runtime.streaming.slots import DeviceSlots, HostSlots
from runtime.weights import to_device

if TYPE_CHECKING:
    from runtime.kv_cache.policy import Policy

_PINNED_SHARE = 0.5  # of the free main memory, for blocks on their way to a GPU


def streamed(blueprint: Blueprint, file: PreparedFile, max_memory: int, policy: Policy | None = None) -> Engine:
    """The engine for a skeleton and its prepared file within `max_memory` bytes; with a policy its cache is compressed.

    What stays is read into memory of this process, not mapped: the bound is known, and a file that shrinks is an error.

    Raises:
        RequestError: not even two blocks fit at a time.
    """
    outside, *blocks = file.groups
    config, dtype = blueprint.module.config, blueprint.dtype
    decided = plan(max_memory, outside.size, [group.size for group in blocks], reserve_for(config, dtype))
    engine: Any = _engine(blueprint, file, decided, policy)
    engine.cache_budget = cache_budget(max_memory, decided.bytes, config, dtype)
    return engine


def _engine(blueprint: Blueprint, file: PreparedFile, decided: Plan, policy: Policy | None) -> Engine:
    outside, *blocks = file.groups
    model, device = blueprint.module, blueprint.device
    _settle(model, file, [outside, *(g for i, g in enumerate(blocks) if i not in decided.streamed)], device)
    moving = {i: blocks[i] for i in decided.streamed}
    for group in moving.values():
        put(model, file.tensors(group))
    share(model, file.contents.aliases)
    to_device(model, device)
    if not moving:
        return lean(TorchEngine(model, device), blueprint, policy)
    slots = _slots(file, blocks, decided, device)
    ring = Ring(slots, decided.streamed)
    try:
        fitting = _lean(blueprint, file, moving, slots, ring, decided) if policy is None else None
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


def _lean(
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
    from runtime.engines.llama_parts import Parts, read_parts
    from runtime.streaming.llama import Moves, StreamedLlama

    parts = read_parts(blueprint.module, blueprint.device)
    if not isinstance(parts, Parts):
        return None
    file.forget()  # the pages that were looked at (norms, biases) are copied where they are needed
    base = torch.frombuffer(file.mapped(), dtype=torch.uint8).data_ptr()
    moves = {i: Moves(parts.blocks[i], base + group.begin, group.size) for i, group in moving.items()}
    engine = TorchEngine(blueprint.module, blueprint.device)
    return StreamedLlama(engine, parts, moves, ring, slots.buffers, decided.bytes)
