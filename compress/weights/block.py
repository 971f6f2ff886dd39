"""Compression of the linear layers of one block: transforms, then one solve for each distinct input, in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from compress.core.file_matrix import in_memory
from compress.core.processes import Team
from compress.core.progress import Reporter
from compress.core.statistics import Statistics
from compress.model.expert_calibration import ExpertCalibration
from compress.model.input_statistics import Forwards, InputGroup, find_groups
from compress.quantize.fixed import Held
from compress.recipe.models import ExpertsConfig
from compress.weights.layer_work import LayerWork
from compress.weights.packed_layer import SolvedLayer, activation_tensors, pack_layer, simulate
from compress.weights.scale_folding import find_folds, fold
from compress.weights.solver.group import solve_group
from runtime import formats
from runtime.errors import CompressError
from runtime.modeling.experts import expert_of
from runtime.modeling.linear_modules import get_matrix, is_matrix
from runtime.system.memory import return_memory

# Solve the layers of a block whose inputs are known: those with equal settings that share an input in one go, dealt out to the processes
# that share the pass.

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
    team = job.team
    found: dict[str, SolvedLayer] = {}
    told: list[tuple[list[str], int, list[SolvedLayer] | str | None]] = []
    failed: CompressError | None = None
    for unit in _units(job, ready, local):
        solved: list[SolvedLayer] | str | None = None
        if unit.owner == team.rank and failed is None:
            try:
                solved = _solve(job, unit, local, work)
            except CompressError as error:
                if team.size == 1:
                    raise
                failed, solved = error, str(error)  # told to the others, which wait for it
        if isinstance(solved, list):  # at once, so that what it replaces is freed
            _put(job, unit.names, solved, work)
        told.append((unit.names, unit.owner, solved))
        unit.statistics = None
    for names, owner, solved in told:
        layers = solved
        if team.size > 1:
            layers = _given(job, owner, solved)
            if owner != team.rank:
                _put(job, names, layers, work)
        assert isinstance(layers, list)
        found |= dict(zip(names, layers, strict=True))
    return found


def _units(job: BlockJob, ready: list[Ready], local: Mapping[str, LayerWork]):  # type: ignore[no-untyped-def]
    """The units in order, each made when its turn comes."""
    sizes = [get_matrix(job.block.get_submodule(n)).shape for group in ready for n in group.members]
    owners = iter(job.team.deal([float(rows) * columns * columns for rows, columns in sizes]))
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
    names = [job.prefix + n for n in unit.names]
    problem = assignment.problem(names, weights, unit.statistics, job.dtype, job.held)
    if assignment.prune is not None:
        problem.sparsity = [local[n].share for n in unit.names]
    solved = solve_group(problem)
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
    own = owner == job.team.rank
    sent = [_packed(layer) for layer in solved] if isinstance(solved, list) else solved
    found: list[SolvedLayer] | str = job.team.exchange(sent if own else None, owner)  # type: ignore[assignment]
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


UNCALLED = "the block does not call this layer on text, but may use its weight in another way"


@dataclass
class BlockJob:
    """What is to be done to one block (or to the part outside of the blocks).

    Attributes:
        prefix: qualified name of `block`, with the final dot; "" outside.
        work: qualified layer name -> what is done to it; only layers of this block.
        held: qualified layer name -> masks and grids that are not to be chosen again.
        experts: which tokens routed experts are calibrated on.
        forwards: (runs one calibration batch through the block, its token mask or None); empty when no data is needed.
        place: directory of the file that holds second moments of so many inputs; None: they are in memory.
        share: what of it this process does: its forwards are of batches of its own, and layers are dealt out.
    """

    prefix: str
    block: nn.Module
    work: dict[str, LayerWork]
    forwards: Forwards
    small_forward: Callable[[torch.dtype], torch.Tensor]
    dtype: torch.dtype
    true_sequential: bool = True
    on_nonfinite: str = "fail"
    held: Mapping[str, Held] = field(default_factory=dict)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    team: Team = field(default_factory=Team)
    place: Callable[[int], Path | None] = in_memory


@dataclass
class BlockResult:
    """Solved layers by qualified name, those left as they were with the reason, and the modules (names inside the block) whose
    values took a scale."""

    layers: dict[str, SolvedLayer] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    scaled: set[str] = field(default_factory=set)


def compress_block(job: BlockJob, reporter: Reporter) -> BlockResult:
    """Solve every assigned layer of the block and leave the compressed weights in place, so that the block runs as it will."""
    result = BlockResult()
    names = _check_weights(job, result)
    local = {name.removeprefix(job.prefix): job.work[name] for name in names}
    if not local:
        return result
    small = job.small_forward
    linears = [n for n, m in job.block.named_modules() if is_matrix(m)]
    experts = ExpertCalibration(job.block, job.prefix, job.experts, job.team, job.place)
    with experts.shown():
        all_groups = find_groups(job.block, lambda: small(job.dtype), linears)
    groups = [InputGroup([n for n in g.members if n in local], g.in_features, g.source) for g in all_groups]
    groups = [g for g in groups if g.members]
    if job.team.size > 1:
        job.team.check_same(f"the layers of {job.prefix.rstrip('.')} that share an input", [g.members for g in groups])
    for name in sorted(set(local) - {n for g in groups for n in g.members}):
        # Nothing could take its place: who does not call a layer may want its weight as a matrix (Mamba's dt_proj).
        del local[name]
        result.skipped[job.prefix + name] = UNCALLED
        reporter.warn(f"{job.prefix}{name} stays as it is: {UNCALLED}")

    work: dict[str, torch.Tensor] = {}
    statistics = _transform(job, groups, all_groups, local, work, result, reporter, experts)
    blind = not any(layer.needs for layer in local.values())
    for wave in [list(range(len(groups)))] if blind else experts.waves(groups):
        wanted = [i for i in wave if i not in statistics and any(local[n].needs for n in groups[i].members)]
        if wanted:
            hessian = any(_wants(local, groups[i], "hessian") for i in wanted)
            found = experts.collect([groups[i] for i in wanted], job.forwards, hessian)
            statistics |= dict(zip(wanted, found, strict=True))
        ready = []
        tokens: dict[str, int] = {}
        for position in wave:
            have, members = statistics.pop(position, None), groups[position].members
            if have is not None and not _finite(job, groups[position], have, result):
                continue
            rounded = experts.nearest.keys() & set(members)
            for name in rounded:
                local[name] = _without_data(job, name, local[name])
            members = [name for name in members if job.prefix + name not in result.skipped]
            ready.append(Ready(members, None if rounded else have))
            tokens |= {} if have is None else dict.fromkeys(members, have.tokens)
        have = None  # each is freed as it is used
        for name, layer in solve_ready(job, ready, local, work).items():
            _note_tokens(job, name, layer, tokens.get(name), experts)
            result.layers[job.prefix + name] = layer
            reporter.detail(f"{job.prefix}{name}  error {layer.record['error'] or 0.0:.3e}")
        return_memory()
    order = {job.prefix + name: number for number, name in enumerate(n for g in groups for n in g.members)}
    result.layers = dict(sorted(result.layers.items(), key=lambda item: order[item[0]]))
    experts.finish(reporter)
    return result


def _without_data(job: BlockJob, name: str, work: LayerWork) -> LayerWork:
    """What is done to a layer of a starved expert that the recipe wants rounded to nearest."""
    found = work.without_data()
    if found.needs:
        raise CompressError(
            f"{job.prefix}{name}: its expert read too few tokens, and {work.describe()} cannot do without them; set "
            "calibration.experts.starved: shared"
        )
    return found


def _note_tokens(job: BlockJob, name: str, layer: SolvedLayer, tokens: int | None, experts: ExpertCalibration) -> None:
    """In the record of an expert's layer: how many tokens it was calibrated on, and what was done where these were too few."""
    if tokens is None or expert_of(job.block, name) is None:
        return
    starved = next((what for what in ("shared", "nearest") if name in getattr(experts, what)), None)
    notes = {"tokens": tokens} | ({} if starved is None else {"starved": starved})
    layer.record["notes"] = {**layer.record["notes"], **notes}


def _transform(
    job: BlockJob,
    groups: list[InputGroup],
    all_groups: list[InputGroup],
    local: dict[str, LayerWork],
    work: dict[str, torch.Tensor],
    result: BlockResult,
    reporter: Reporter,
    experts: ExpertCalibration,
) -> dict[int, Statistics]:
    """Apply function-preserving scales where the recipe asks for them; returns the statistics that are good to solve with."""
    transformed = [i for i, g in enumerate(groups) if any(local[n].transform is not None for n in g.members)]
    # A solver that compensates does best on what the layers before it became; one that does not (Wanda, rounding) ranks and
    # scales better by what the original block sees, as its papers do.
    late = {i for i, g in enumerate(groups) if job.true_sequential and any(local[n].compensates for n in g.members)}
    early = [
        i
        for i, g in enumerate(groups)
        if i in transformed or (i not in late and any(local[n].needs for n in g.members))
    ]
    if not early:
        return {}
    hessian = any(_wants(local, groups[i], "hessian") for i in early)
    found = experts.collect([groups[i] for i in early], job.forwards, hessian)
    statistics = dict(zip(early, found, strict=True))
    if not transformed:
        return statistics
    small = job.small_forward
    job.block.float()
    try:
        places = find_folds(job.block, [groups[i] for i in transformed], all_groups, lambda: small(torch.float32))
        places = job.team.agreed(places)
    finally:
        job.block.to(job.dtype)
    for name, module in job.block.named_modules():
        if is_matrix(module):
            work[name] = get_matrix(module).to(torch.float32, copy=True)
    for place in places:
        position = next(i for i in transformed if groups[i].members[0] in place.consumers)
        lead = local[next(n for n in groups[position].members if local[n].transform is not None)]
        wanted = lead.transform([work[n] for n in place.consumers], statistics[position], lead.scheme, lead.quantize)
        columns = fold(job.block, place, job.team.agreed(place.shared(wanted)), work)
        statistics[position] = statistics[position].scaled(columns)
        result.scaled |= {place.producer, *place.consumers}
    scaled = {i for i in transformed for p in places if groups[i].members[0] in p.consumers}
    for position in transformed:
        if position not in scaled:
            reporter.detail(
                f"{job.prefix}{groups[position].members[0]}: nothing before it can take a scale; solved without one"
            )
    return {i: s for i, s in statistics.items() if i not in late}


def _check_weights(job: BlockJob, result: BlockResult) -> list[str]:
    """Names of the layers that can be solved. A tensor with NaN or Inf, compressed or not, is named and stops the run or is left."""
    bad = {job.prefix + n for n, p in job.block.named_parameters() if not bool(torch.isfinite(p).all())}
    for tensor in sorted(bad):
        name = tensor.removesuffix(".weight")
        leave_nonfinite(name, f"{name}: the weight holds NaN or Inf", job.on_nonfinite, result)
    return [name for name in job.work if f"{name}.weight" not in bad]


def _finite(job: BlockJob, group: InputGroup, statistics: Statistics, result: BlockResult) -> bool:
    if statistics.finite:
        return True
    for name in group.members:
        own = job.prefix + name
        leave_nonfinite(own, f"{own}: its calibration inputs hold NaN or Inf", job.on_nonfinite, result)
    return False


def leave_nonfinite(name: str, reason: str, on_nonfinite: str, result: BlockResult) -> None:
    """Note why a layer stays as it is; CompressError where the recipe says `on_nonfinite: fail`."""
    if on_nonfinite == "fail":
        raise CompressError(
            f"{reason}; repair the checkpoint, or set on_nonfinite: skip to leave such layers as they are"
        )
    result.skipped[name] = reason


def _wants(local: dict[str, LayerWork], group: InputGroup, what: str) -> bool:
    return any(what in local[n].needs for n in group.members)
