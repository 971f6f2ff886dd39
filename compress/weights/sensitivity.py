"""Sensitivity of a model to fewer bits: stored size, output error and KL divergence of each unit of layers at every candidate."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.core.statistics import Statistics
from compress.core.tensors import finite
from compress.evaluate.metrics import TokenMetrics
from compress.evaluate.streamed import LOGIT_ROWS
from compress.model.expert_calibration import ExpertCalibration
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import InputGroup, find_groups, forwards
from compress.model.streamed import Batch, StreamedModel
from compress.weights.artifact import budget_bytes, candidate_bytes
from compress.weights.layer_task import LayerTask
from compress.weights.packed_layer import solve_layers
from compress.weights.plan import Budget, WeightPlan
from runtime.formats.scheme import Scheme
from runtime.modeling.experts import expert_of
from runtime.modeling.linear_modules import get_matrix, set_matrix

#: Tokens of calibration text on which the KL divergence of a unit is measured, at least (one batch).
MEASURED_TOKENS = 2048


@dataclass
class Unit:
    """Layers that get one scheme, since engines fuse what reads one input, and the experts of a layer.

    Attributes:
        layers: qualified names. weights: of all of them.
        sizes: stored bytes by candidate.
        errors: output error by candidate, summed over layers; only ratios between candidates count.
        losses: KL divergence in nats per token by candidate, of those that were measured.
    """

    candidates: tuple[Scheme, ...]
    layers: list[str] = field(default_factory=list)
    weights: int = 0
    sizes: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes, self.errors = [0] * len(self.candidates), [0.0] * len(self.candidates)

    def predicted(self) -> list[float]:
        """KL divergence by candidate: it grows with the output error, as both are quadratic in a small change of the weights."""
        found = []
        for candidate, error in enumerate(self.errors):
            nearest = min(self.losses, key=lambda measured: abs(measured - candidate))
            known = self.errors[nearest]
            found.append(self.losses[nearest] * (error / known if known > 0 else 1.0))
        return found


def measured_candidates(plan: WeightPlan, budget: Budget) -> list[int]:
    """Numbers of the two candidates at which KL is measured: next to what the budget is on average, or in the middle of all."""
    sizes = candidate_bytes(plan)
    allowed = budget_bytes(plan, budget, [name for name, task in plan.tasks.items() if task.candidates])
    if allowed is None:
        middle = max(1, len(sizes) // 2 - 1)
        return [middle - 1, middle]
    below = max((number for number, size in enumerate(sizes) if size <= allowed), key=lambda n: sizes[n])
    above = min((number for number, size in enumerate(sizes) if size > allowed), key=lambda n: sizes[n], default=below)
    return sorted({below, above})


class Measurement:
    """The units of a model: their stored sizes and output errors at every candidate, by the stage's own method, and the KL divergence of
    the model in which one unit alone is compressed, at some.

    Args:
        work: directory of hidden states that spill, and of second moments in files.

    Attributes:
        units: in model order; complete once `finish` was called.
    """

    def __init__(self, plan: WeightPlan, budget: Budget, work: Path, spill: bool) -> None:
        self.units: list[Unit] = []
        self._plan, self._measured, self._work = plan, measured_candidates(plan, budget), work
        self._streamed = plan.context.streamed
        self._batches: list[Batch] = []
        tokens = 0
        for batch in plan.context.batches:  # those on which KL is measured
            if tokens < MEASURED_TOKENS:
                self._batches.append(batch)
                tokens += batch[0].numel()
        # For each unit and measured candidate the hidden states of these batches.
        self._states = HiddenStates(0, work / "hidden-allocation-units" if spill else None)
        self._keys: list[tuple[Unit, int]] = []

    def visit(self, index: int, block: nn.Module, states: HiddenStates) -> None:
        """Measure the units of a block, and go on with those before it."""
        with torch.inference_mode():
            for number in range(len(self._keys) * len(self._batches)):
                batch = self._batches[number % len(self._batches)]
                self._states.put(number, self._streamed.advance(index, self._states.get(number), batch))
        prefix = self._streamed.block_prefix(index)
        tasks = {
            name.removeprefix(prefix): task
            for name, task in self._plan.of_block(index).items()
            if task.candidates and finite(get_matrix(block.get_submodule(name.removeprefix(prefix))))
        }
        if not tasks:
            return
        runs = forwards(self._streamed, index, states, self._plan.context.batches)
        place = partial(self._plan.context.bounds.place, self._work)
        experts = ExpertCalibration(block, prefix, self._plan.context.recipe.calibration.experts, place=place)
        with experts.shown():
            groups = find_groups(block, runs[0][0], list(tasks))
        waves: dict[object, list[list[int]]] = {}
        for wave in experts.waves(groups):
            home = expert_of(block, groups[wave[0]].members[0])
            waves.setdefault(wave[0] if home is None else home[0], []).append(wave)
        for own in waves.values():
            unit = Unit(tasks[groups[own[0][0]].members[0]].candidates)
            dense: dict[int, dict[str, torch.Tensor]] = {candidate: {} for candidate in self._measured}
            for wave in own:
                needs = {need for position in wave for name in groups[position].members for need in tasks[name].needs}
                found = experts.collect([groups[position] for position in wave], runs, needs=needs)
                for position, statistics in zip(wave, found, strict=True):
                    if statistics.finite:  # else the pass says so
                        self._solve(unit, block, groups[position], tasks, prefix, statistics, dense)
            if not unit.layers:
                continue
            self.units.append(unit)
            for candidate, weights in dense.items():
                self._enter(unit, candidate, index, block, weights, states)
        experts.finish()

    def _solve(
        self,
        unit: Unit,
        block: nn.Module,
        group: InputGroup,
        tasks: dict[str, LayerTask],
        prefix: str,
        statistics: Statistics,
        dense: dict[int, dict[str, torch.Tensor]],
    ) -> None:
        """Compress the layers of one input at every candidate; dense weights of those that are measured go to `dense`."""
        alike: list[list[str]] = []  # one of a group may be pruned and another not
        for name in group.members:
            together = next((names for names in alike if tasks[names[0]].same_settings(tasks[name])), None)
            if together is None:
                alike.append(together := [])
            together.append(name)
        unit.layers += [prefix + name for name in group.members]
        for candidate, names in product(range(len(unit.candidates)), alike):
            modules = [block.get_submodule(name) for name in names]
            weights = [get_matrix(module).detach() for module in modules]
            unit.weights += sum(weight.numel() for weight in weights) if candidate == 0 else 0
            own = {prefix + n: _settled(tasks[n], tasks[n].candidates[candidate], statistics.tokens) for n in names}
            seen = statistics if statistics.tokens and next(iter(own.values())).needs else None
            solved = solve_layers(own, modules, weights, seen, self._streamed.dtype, self._plan.constraints)
            for name, layer in zip(names, solved, strict=True):
                unit.sizes[candidate] += layer.record["bytes_after"]
                unit.errors[candidate] += layer.record["error"] * statistics.tokens * layer.shape[0]
                if candidate in dense:
                    dense[candidate][name] = layer.dense

    @torch.inference_mode()
    def _enter(
        self,
        unit: Unit,
        candidate: int,
        index: int,
        block: nn.Module,
        weights: dict[str, torch.Tensor],
        states: HiddenStates,
    ) -> None:
        """The hidden states after a block in which one unit alone is compressed."""
        modules = {name: block.get_submodule(name) for name in weights}
        before = {name: get_matrix(module).clone() for name, module in modules.items()}
        for name, module in modules.items():
            set_matrix(module, weights[name].to(before[name].device))
        for number, batch in enumerate(self._batches):
            place = len(self._keys) * len(self._batches) + number
            self._states.put(place, self._streamed.advance(index, states.get(number), batch))
        for name, module in modules.items():
            set_matrix(module, before[name])
        self._keys.append((unit, candidate))

    @torch.inference_mode()
    def finish(self, states: HiddenStates) -> None:
        """Compare what the model says with what it says with each unit compressed."""
        streamed, count = self._streamed, len(self._batches)
        found = [_Divergence(streamed) for _ in self._keys]
        with streamed.outside():
            for number, (ids, mask) in enumerate(self._batches):
                step = max(1, LOGIT_ROWS // streamed.rows.length(ids))
                for start in range(0, len(ids), step):
                    part = slice(start, start + step)
                    kept = None if mask is None else mask[part].to(streamed.device)

                    def said(held: HiddenStates, place: int, part: slice = part, rows: torch.Tensor = ids) -> Any:
                        return streamed.outputs(held.get(place)[part].to(streamed.device), rows[part])

                    reference = said(states, number)
                    for key, divergence in enumerate(found):
                        divergence.add(said(self._states, key * count + number), reference, kept)
        for (unit, candidate), divergence in zip(self._keys, found, strict=True):
            unit.losses[candidate] = divergence.mean
        self._states.drop()


class _Divergence:
    """Mean KL divergence in nats per token; of encoders, which predict no tokens, the squared change of their outputs relative to these."""

    def __init__(self, streamed: StreamedModel) -> None:
        self._metrics = None if streamed.kind == "encoder" else TokenMetrics()
        self._changed = self._size = 0.0

    def add(self, outputs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Outputs `[b, s, n]` beside those of the original model; `mask` bool `[b, s]`: the tokens that count."""
        ours, theirs = (value.flatten(0, 1) if mask is None else value[mask] for value in (outputs, reference))
        if self._metrics is not None:
            self._metrics.add(ours, theirs.argmax(-1), theirs)
            return
        self._changed += float((ours.float() - theirs.float()).square().sum())
        self._size += float(theirs.float().square().sum())

    @property
    def mean(self) -> float:
        """Of what was added."""
        return self._changed / (self._size or 1.0) if self._metrics is None else float(self._metrics.result()["kl"])


def _settled(task: LayerTask, scheme: Scheme, tokens: int) -> LayerTask:
    """The task with one of its candidates, fitted to the layer's own outputs; without data where no token reached the layer."""
    # Candidates are only ranked, so what `quality: best` sets is at its defaults, which are several times as fast.
    defaults = {name: type(task.quantize).model_fields[name].default for name in task.quantize.best_fields}
    quantize = task.quantize.model_copy(update=defaults)
    found = replace(task, scheme=scheme, candidates=(), quantize=quantize)
    return found if tokens else found.without_data()
