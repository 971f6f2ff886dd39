"""Compression of the linear layers of one block: transforms, then one solve for each distinct input, in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from compress.core.file_matrix import in_memory
from compress.core.processes import Team
from compress.core.progress import Reporter
from compress.core.statistics import Statistics
from compress.core.tensors import finite
from compress.model.expert_calibration import ExpertCalibration
from compress.model.input_statistics import Forwards, InputGroup, find_groups
from compress.model.module_outputs import ModuleOutputs
from compress.model.original_block import OriginalBlock, find_residual_layers
from compress.model.tensor_model import same_input
from compress.quantize.transforms import Basis
from compress.quantize.weight_constraint import WeightConstraint
from compress.recipe import Recipe
from compress.weights.layer_task import LayerTask
from compress.weights.packed_layer import SolvedLayer, share_inputs, simulate, solve_layers
from compress.weights.scale_folding import find_folds, fold
from runtime.errors import CompressError
from runtime.modeling.experts import expert_of
from runtime.modeling.linear_modules import get_matrix, is_matrix
from runtime.system.memory import return_memory

#: Largest number of weights that are solved together, where many layers share an input.
SOLVED_AT_ONCE = 2**27
UNCALLED = "the block does not call this layer on text, but may use its weight in another way"


@dataclass
class _Unit:
    """Layers (names inside the block) that process `owner` solves together; `basis`: in which; `size`: their weights."""

    statistics: Statistics | None
    owner: int
    basis: Basis | None
    names: list[str] = field(default_factory=list)
    size: int = 0


@dataclass
class BlockResult:
    """Solved layers by qualified name, those left as they were with the reason, and the modules (names inside the block) whose
    values took a scale."""

    layers: dict[str, SolvedLayer] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    scaled: set[str] = field(default_factory=set)

    def skip_nonfinite(self, name: str, what: str, recipe: Recipe) -> None:
        """Leave a layer with NaN or Inf as it is; CompressError where the recipe says `on_nonfinite: fail`."""
        if recipe.on_nonfinite == "fail":
            raise CompressError(
                f"{name}: {what} NaN or Inf; repair the checkpoint, or set on_nonfinite: skip to leave such layers as they are"
            )
        self.skipped[name] = f"{name}: {what} NaN or Inf"

    def add_layer(self, name: str, layer: SolvedLayer, reporter: Reporter) -> None:
        """Record a solved layer; where a lossless representation saves nothing, the original stays."""
        weights, record = layer.entry.scheme.weights, layer.record
        if weights is None or not weights.lossless or record["bytes_after"] < record["bytes_before"]:
            self.layers[name] = layer
            reporter.detail(f"{name}  error {record['error'] or 0.0:.3e}")
            return
        sizes = f"{record['bytes_after']} bytes instead of {record['bytes_before']}"
        self.skipped[name] = f"{weights.describe()} would take {sizes}"
        reporter.warn(f"{name} is kept uncompressed: {self.skipped[name]}")


@dataclass
class BlockJob:
    """The compression of one block; `run` is called once.

    Attributes:
        prefix: qualified name of `block`, with the final dot.
        tasks: of the layers of this block, by qualified name.
        forwards: (runs one calibration batch through the block, its token mask or None); empty when no data is needed.
        small_forward: runs the block over one row in a given dtype; None: nothing runs it, and no task needs that.
        dtype: of the model.
        constraints: masks and grids that stay, by qualified layer name.
        team: processes that share the block: each has forwards of batches of its own, and layers are dealt out.
        place: directory of the file that holds second moments of so many inputs; None: they are in memory.
        outputs: of submodules that `forwards` need not compute again.
        original: the block in the original model, where the errors of layers before count.
        output_hessian: of a layer, by its name in the block.
    """

    prefix: str
    block: nn.Module
    tasks: dict[str, LayerTask]
    forwards: Forwards
    outputs: ModuleOutputs
    small_forward: Callable[[torch.dtype], torch.Tensor] | None
    dtype: torch.dtype
    recipe: Recipe
    reporter: Reporter
    constraints: Mapping[str, WeightConstraint] = field(default_factory=dict)
    team: Team = field(default_factory=Team)
    place: Callable[[int], Path | None] = in_memory
    original: OriginalBlock | None = None
    output_hessian: Callable[[str], torch.Tensor | None] | None = None

    def __post_init__(self) -> None:
        self.result = BlockResult()
        self._tasks = {name.removeprefix(self.prefix): self.tasks[name] for name in self._finite_layers()}
        self._scaled: dict[str, torch.Tensor] = {}  # float32 weights of layers that took a scale
        self._divided: dict[str, torch.Tensor] = {}  # what outputs of layers were divided by

    def run(self) -> BlockResult:
        """Solve every assigned layer and leave the compressed weights in place, so that the block runs as the artifact will."""
        result, tasks, team = self.result, self._tasks, self.team
        if not tasks:
            return result
        experts = ExpertCalibration(self.block, self.prefix, self.recipe.calibration.experts, team, self.place)
        self._experts = experts
        all_groups = self._input_groups(experts)
        if self.original is not None:
            self.original.outputs.watch_as(self.outputs)
            self.original.residual_layers = find_residual_layers(
                self.block, partial(self._run_small, self.dtype), tasks
            )
        groups = [InputGroup([n for n in g.members if n in tasks], g.in_features, g.source) for g in all_groups]
        groups = [g for g in groups if g.members]
        if team.size > 1:
            team.check_same(f"the layers of {self.prefix.rstrip('.')} that share an input", [g.members for g in groups])
        for name in sorted(set(tasks) - {n for g in groups for n in g.members}):
            # Its module cannot be replaced: the block may read the weight as a matrix (Mamba's dt_proj).
            del tasks[name]
            result.skipped[self.prefix + name] = UNCALLED
            self.reporter.warn(f"{self.prefix}{name} stays as it is: {UNCALLED}")

        statistics = self._transform(groups, all_groups)
        blind = not any(task.needs for task in tasks.values())
        unsolved = set(tasks)
        for wave in [list(range(len(groups)))] if blind else experts.waves(groups):
            alone = all(expert_of(self.block, groups[position].members[0]) is None for position in wave)
            self.outputs.settle(unsolved, stops=alone)
            if self.original is not None:
                self.original.outputs.settle(unsolved, stops=alone)
            statistics |= self._collect(groups, [i for i in wave if i not in statistics])
            ready: list[tuple[list[str], Statistics | None]] = []
            tokens: dict[str, int] = {}
            for position in wave:
                have, members = statistics.pop(position, None), groups[position].members
                if have is not None and not have.finite:
                    for name in members:
                        result.skip_nonfinite(self.prefix + name, "its calibration inputs hold", self.recipe)
                    continue
                tokens |= {} if have is None else dict.fromkeys(members, have.tokens)
                if rounded := experts.nearest.keys() & set(members):
                    have = None
                    tasks |= {name: self._without_data(name) for name in rounded}
                ready.append(([n for n in members if self.prefix + n not in result.skipped], have))
            units, have = self._units(ready), None
            ready.clear()  # statistics are freed as they are used
            for name, layer in self._solve_units(units).items():
                self._note_tokens(name, layer, tokens.get(name))
                result.add_layer(self.prefix + name, layer, self.reporter)
            unsolved -= {name for position in wave for name in groups[position].members}
            return_memory()
        order = {self.prefix + name: number for number, name in enumerate(n for g in groups for n in g.members)}
        result.layers = dict(sorted(result.layers.items(), key=lambda item: order[item[0]]))
        experts.finish(self.reporter)
        return result

    def _run_small(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.small_forward is not None
        return self.small_forward(dtype)

    def _input_groups(self, experts: ExpertCalibration) -> list[InputGroup]:
        """The linear layers of the block by what they read; where nothing runs the block, as their names tell."""
        linears = {name: module for name, module in self.block.named_modules() if is_matrix(module)}
        if self.small_forward is None:
            found = same_input(linears)
            return [InputGroup(names, get_matrix(linears[names[0]]).shape[1], None) for names in found]
        with experts.shown(), self.outputs.watched():
            return find_groups(self.block, partial(self._run_small, self.dtype), linears)

    def _finite_layers(self) -> list[str]:
        """Qualified names of the layers that can be solved. A tensor with NaN or Inf, compressed or not, stops the run or is skipped."""
        # What nothing runs is only copied: it may well be a mask.
        read = {f"{name}.weight" for name in self.tasks} if self.small_forward is None else None
        named = ((self.prefix + name, parameter) for name, parameter in self.block.named_parameters())
        bad = {name for name, parameter in named if (read is None or name in read) and not finite(parameter)}
        for tensor in sorted(bad):
            self.result.skip_nonfinite(tensor.removesuffix(".weight"), "the weight holds", self.recipe)
        return [name for name in self.tasks if f"{name}.weight" not in bad]

    # ------------------------------------------------------------ calibration
    def _needs(self, group: InputGroup) -> set[str]:
        return set().union(*(self._tasks[n].needs for n in group.members))

    def _collect(self, groups: list[InputGroup], positions: list[int]) -> dict[int, Statistics]:
        """Statistics of the inputs of those groups, by their positions, that need any."""
        wanted = [i for i in positions if self._needs(groups[i])]
        if not wanted:
            return {}
        needs = set().union(*(self._needs(groups[i]) for i in wanted))
        original = self.original.runs if "drift" in needs and self.original is not None else None
        found = self._experts.collect([groups[i] for i in wanted], self.forwards, needs, original)
        return dict(zip(wanted, found, strict=True))

    def _transform(self, groups: list[InputGroup], all_groups: list[InputGroup]) -> dict[int, Statistics]:
        """Apply function-preserving scales where the recipe asks for them; returns the statistics that later solves may use."""
        tasks = self._tasks
        transformed = [i for i, g in enumerate(groups) if any(tasks[n].transform is not None for n in g.members)]
        # A solver that compensates does best on what the layers before it became; one that does not (Wanda, rounding) ranks and
        # scales better by what the original block sees, as its papers do.
        sequential = self.recipe.true_sequential
        late = {i for i, g in enumerate(groups) if sequential and any(tasks[n].compensates for n in g.members)}
        statistics = self._collect(groups, [i for i in range(len(groups)) if i in transformed or i not in late])
        if not transformed:
            return statistics
        self.block.float()
        try:
            inputs = [groups[i] for i in transformed]
            places = find_folds(self.block, inputs, all_groups, partial(self._run_small, torch.float32))
            places = self.team.broadcast(places)
        finally:
            self.block.to(self.dtype)
        for name, module in self.block.named_modules():
            if is_matrix(module):
                self._scaled[name] = get_matrix(module).to(torch.float32, copy=True)
        versions = [(self.block, self._scaled)]
        if self.original is not None:  # its function stays, and its layers read what those of the block read
            block = self.original.block
            versions.append((block, {n: get_matrix(block.get_submodule(n)).float() for n in self._scaled}))
        folded = set()
        for place in places:
            position = next(i for i in transformed if groups[i].members[0] in place.consumers)
            lead = tasks[next(n for n in groups[position].members if tasks[n].transform is not None)]
            weights = [self._scaled[n] for n in place.consumers]
            wanted = lead.transform(weights, statistics[position], lead.scheme, lead.quantize)
            scale = self.team.broadcast(place.shared(wanted))
            columns, *_ = [fold(block, place, scale, weights) for block, weights in versions]
            self._divided[place.producer] = self._divided.get(place.producer, 1.0) * scale
            statistics[position] = statistics[position].scaled(columns)
            self.result.scaled |= {place.producer, *place.consumers}
            folded.add(position)
        for position in transformed:
            if position not in folded:
                first = groups[position].members[0]
                self.reporter.detail(f"{self.prefix}{first}: nothing before it can take a scale; solved without one")
        return {i: s for i, s in statistics.items() if i not in late}

    def _without_data(self, name: str) -> LayerTask:
        """The task of a layer of a starved expert that the recipe wants rounded to nearest."""
        task = self._tasks[name]
        found = task.without_data()
        if found.needs:
            raise CompressError(
                f"{self.prefix}{name}: its expert read too few tokens, and {task.describe()} cannot do without them; set "
                "calibration.experts.starved: shared"
            )
        return found

    def _note_tokens(self, name: str, layer: SolvedLayer, tokens: int | None) -> None:
        """Record of an expert's layer how many tokens it was calibrated on, and how it was solved where these were too few."""
        if tokens is None or expert_of(self.block, name) is None:
            return
        starved = next((what for what in ("shared", "nearest") if name in getattr(self._experts, what)), None)
        notes = {"tokens": tokens} | ({} if starved is None else {"starved": starved})
        layer.record["notes"] = {**layer.record["notes"], **notes}

    # ------------------------------------------------------------ solving
    def _units(self, ready: list[tuple[list[str], Statistics | None]]) -> list[_Unit]:
        """Layers, grouped by the input that they share, in groups that one process solves together."""
        shapes = {name: get_matrix(self.block.get_submodule(name)).shape for members, _ in ready for name in members}
        costs = [float(rows) * columns * columns for rows, columns in shapes.values()]
        owners = dict(zip(shapes, self.team.deal(costs), strict=True))
        units: list[_Unit] = []
        for members, statistics in ready:
            first = len(units)
            weights = {name: self._weight(name) for name in members}
            shared, bases = share_inputs({name: self._tasks[name] for name in members}, weights, statistics, self.team)
            self._tasks |= shared
            for name in members:
                size, owner, task = shapes[name].numel(), owners[name], self._tasks[name]
                alike = (u for u in units[first:] if u.owner == owner and u.size + size <= SOLVED_AT_ONCE)
                unit = next((u for u in alike if self._tasks[u.names[0]].same_settings(task)), None)
                if unit is None:
                    units.append(unit := _Unit(statistics, owner, bases.get(name)))
                unit.names.append(name)
                unit.size += size
        return units

    def _weight(self, name: str) -> torch.Tensor:
        return self._scaled.get(name, get_matrix(self.block.get_submodule(name)))

    def _solve_units(self, units: list[_Unit]) -> dict[str, SolvedLayer]:
        """Solve layers and put what the artifact will compute in their place; by name inside the block.

        Every process of the team calls this with the same layers, solves its own and receives the others'. `units` is emptied, so
        that statistics are freed as they are used.
        """
        found: dict[str, SolvedLayer] = {}
        shared: list[tuple[list[str], int, list[SolvedLayer] | str | None]] = []
        failed = False
        while units:
            unit = units.pop(0)
            solved: list[SolvedLayer] | str | None = None
            if unit.owner == self.team.rank and not failed:
                try:
                    solved = self._solve(unit)
                    self._put(unit.names, solved)  # at once, so that what it replaces is freed
                except CompressError as error:
                    if self.team.size == 1:
                        raise
                    failed, solved = True, str(error)  # the others wait for it
            shared.append((unit.names, unit.owner, solved))
            del unit
        for names, owner, solved in shared:
            layers = self._exchange(names, owner, solved) if self.team.size > 1 else solved
            assert isinstance(layers, list)
            found |= dict(zip(names, layers, strict=True))
        return found

    def _solve(self, unit: _Unit) -> list[SolvedLayer]:
        tasks = {self.prefix + name: self._tasks[name] for name in unit.names}
        modules = [self.block.get_submodule(name) for name in unit.names]
        weights = [self._weight(name) for name in unit.names]
        hessians = None
        if self._output_aware(unit.names[0]):
            found = [self._output_hessian(name, weight) for name, weight in zip(unit.names, weights, strict=True)]
            hessians = [each for each in found if each is not None]
            if len(hessians) < len(found):
                name = self.prefix + unit.names[0]
                self.reporter.warn(f"{name}: the loss does not depend on what it gives; fitted to that (propagated)")
                hessians = None
        return solve_layers(
            tasks, modules, weights, unit.statistics, self.dtype, self.constraints, hessians, unit.basis
        )

    def _output_aware(self, name: str) -> bool:
        """Whether a layer's output Hessian counts: not that of a routed expert (none is collected)."""
        return self._tasks[name].output_aware and expert_of(self.block, name) is None

    def _output_hessian(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        assert self.output_hessian is not None
        found, by = self.output_hessian(name), self._divided.get(name)
        if found is None:
            return None
        found = found.to(weight.device)
        return found if by is None else found * by[:, None] * by

    def _put(self, names: list[str], solved: list[SolvedLayer]) -> None:
        for name, layer in zip(names, solved, strict=True):
            simulate(self.block, name, layer)
            self._scaled.pop(name, None)

    def _exchange(self, names: list[str], owner: int, solved: list[SolvedLayer] | str | None) -> list[SolvedLayer]:
        """Layers that process `owner` has solved (in the others `solved` is None), put in place in all.

        Raises:
            CompressError: they could not be solved; in all processes alike.
        """
        sent = [layer.without_dense() for layer in solved] if isinstance(solved, list) else solved
        found: list[SolvedLayer] | str = self.team.exchange(sent, owner)  # type: ignore[assignment]
        if isinstance(found, str):
            raise CompressError(found)
        if isinstance(solved, list):
            return solved
        layers = [layer.with_dense() for layer in found]
        self._put(names, layers)
        return layers
