"""Solve the layers of a block whose inputs are known: those with equal settings that share an input in one go, dealt out to the processes
that share the pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from compress.pipeline.layer import SolvedLayer, activation_tensors, pack_layer, simulate
from compress.pipeline.work import LayerWork
from compress.solver.group import solve_group
from compress.statistics import Statistics
from runtime import formats
from runtime.errors import CompressError
from runtime.matrices import get_matrix

if TYPE_CHECKING:
    from compress.pipeline.block import BlockJob

#: Weights that are solved in one go, where many layers share an input.
SOLVED_AT_ONCE = 2**27


@dataclass
class Ready:
    """Layers (names inside the block) that share an input, of which all is known that their methods need.

    Attributes:
        statistics: of the input; None: nothing is needed.
    """

    members: list[str]
    statistics: Statistics | None


@dataclass
class _Unit:
    """What is solved in one go, by the process `owner`."""

    names: list[str]
    statistics: Statistics | None
    owner: int


def solve_ready(
    job: BlockJob, ready: list[Ready], local: Mapping[str, LayerWork], work: dict[str, torch.Tensor]
) -> dict[str, SolvedLayer]:
    """Solve layers and put what the artifact will compute in their place; by name inside the block.

    Every process that shares the pass calls this with the same layers, solves its own and is given the others'. `ready` is emptied, so
    that statistics are freed as they are used.

    Args:
        local: what is done to each layer.
        work: float32 weights of layers that took a scale; emptied likewise.
    """
    share = job.share
    found: dict[str, SolvedLayer] = {}
    told: list[tuple[list[str], int, list[SolvedLayer] | str | None]] = []
    failed: CompressError | None = None
    for unit in _units(job, ready, local):
        solved: list[SolvedLayer] | str | None = None
        if unit.owner == share.rank and failed is None:
            try:
                solved = _solve(job, unit, local, work)
            except CompressError as error:
                if share.size == 1:
                    raise
                failed, solved = error, str(error)  # told to the others, which wait for it
        if isinstance(solved, list):  # at once, so that what it replaces is freed
            _put(job, unit.names, solved, work)
        told.append((unit.names, unit.owner, solved))
        unit.statistics = None
    for names, owner, solved in told:
        layers = solved
        if share.size > 1:
            layers = _given(job, owner, solved)
            if owner != share.rank:
                _put(job, names, layers, work)
        assert isinstance(layers, list)
        found |= dict(zip(names, layers, strict=True))
    return found


def _units(job: BlockJob, ready: list[Ready], local: Mapping[str, LayerWork]):  # type: ignore[no-untyped-def]
    """The units in order, each made when its turn comes."""
    sizes = [get_matrix(job.block.get_submodule(n)).shape for group in ready for n in group.members]
    owners = iter(job.share.deal([float(rows) * columns * columns for rows, columns in sizes]))
    dealt = [[next(owners) for _ in group.members] for group in ready]
    dealt.reverse()
    ready.reverse()
    while ready:
        group, ranks = ready.pop(), dealt.pop()
        units = _together(job, group, ranks, local)
        del group
        while units:
            yield units.pop(0)


def _together(job: BlockJob, group: Ready, ranks: Sequence[int], local: Mapping[str, LayerWork]) -> list[_Unit]:
    """Layers of a group that one process solves in one go."""
    units: list[_Unit] = []
    for name, rank in zip(group.members, ranks, strict=True):
        size = _size(job, name)
        for unit in units:
            there = sum(_size(job, n) for n in unit.names)
            same = local[unit.names[0]].same_settings(local[name])
            if unit.owner == rank and there + size <= SOLVED_AT_ONCE and same:
                unit.names.append(name)
                break
        else:
            units.append(_Unit([name], group.statistics, rank))
    return units


def _size(job: BlockJob, name: str) -> int:
    return get_matrix(job.block.get_submodule(name)).numel()


def _solve(
    job: BlockJob, unit: _Unit, local: Mapping[str, LayerWork], work: Mapping[str, torch.Tensor]
) -> list[SolvedLayer]:
    assignment = local[unit.names[0]]
    modules = [job.block.get_submodule(n) for n in unit.names]
    weights = [work[n] if n in work else get_matrix(m) for n, m in zip(unit.names, modules, strict=True)]
    solved = solve_group(
        weights, unit.statistics, assignment.prune, assignment.quantize, assignment.scheme, dtype=job.dtype,
        names=[job.prefix + n for n in unit.names],
        sparsity=[local[n].share for n in unit.names] if assignment.prune is not None else None,
        held=assignment.hold([job.held.get(job.prefix + n) for n in unit.names]),
    )  # fmt: skip
    packed = []
    for name, module, layer in zip(unit.names, modules, solved, strict=True):
        inputs = activation_tensors(assignment.scheme, unit.statistics, job.dtype)
        packed.append(pack_layer(job.prefix + name, assignment, layer, inputs, module))
    return packed


def _put(job: BlockJob, names: list[str], solved: list[SolvedLayer], work: dict[str, torch.Tensor]) -> None:
    for name, layer in zip(names, solved, strict=True):
        simulate(job.block, name, layer)
        work.pop(name, None)


def _given(job: BlockJob, owner: int, solved: list[SolvedLayer] | str | None) -> list[SolvedLayer]:
    """What another process has solved, or all others are given what this one has.

    Raises:
        CompressError: it could not be solved; in all processes alike.
    """
    own = owner == job.share.rank
    sent = [_packed(layer) for layer in solved] if isinstance(solved, list) else solved
    found: list[SolvedLayer] | str = job.share.exchange(sent if own else None, owner)  # type: ignore[assignment]
    if isinstance(found, str):
        raise CompressError(found)
    return solved if isinstance(solved, list) else [_opened(layer) for layer in found]  # type: ignore[attr-defined]


def _packed(layer: SolvedLayer) -> SolvedLayer:
    """As it travels: without the dense weight, which its tensors unpack to."""
    tensors = {key: value.cpu() for key, value in layer.tensors.items()}
    return replace(layer, tensors=tensors, dense=torch.empty(0, dtype=layer.dense.dtype))


def _opened(layer: SolvedLayer) -> SolvedLayer:
    storage = formats.get(layer.entry.format)
    weight = storage.unpack(layer.tensors, layer.entry.scheme, layer.shape, layer.dense.dtype)
    return replace(layer, dense=weight.dequantize().contiguous())
