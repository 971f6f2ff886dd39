"""Sparsity of each layer where a recipe does not want the same for all: one pass over the uncompressed blocks, before the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.core.statistics import Statistics
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import collect, find_groups, forwards
from compress.model.streamed import Batch, StreamedModel
from compress.prune.allocation import allocate, error_score, outlier_score
from compress.weights.layer_task import LayerTask
from compress.weights.plan import WeightPlan
from runtime.errors import CompressError
from runtime.modeling.linear_modules import get_matrix

PART = "allocation"
Weights = Mapping[str, torch.Tensor]


def _owl(weights: Weights, seen: Mapping[str, Statistics], target: float) -> dict[str, float]:
    """All layers of a block share its score, as in the paper."""
    return dict.fromkeys(weights, outlier_score(list(weights.values()), [seen[name] for name in weights]))


def _error(weights: Weights, seen: Mapping[str, Statistics], target: float) -> dict[str, float]:
    return {name: error_score(weight, seen[name], target) for name, weight in weights.items()}


SCORES: dict[str, Callable[[Weights, Mapping[str, Statistics], float], dict[str, float]]] = {
    "owl": _owl,
    "error": _error,
}


def allocate_sparsity(plan: WeightPlan, directory: RunDirectory, reporter: Reporter, spill: bool) -> None:
    """Set `LayerTask.sparsity` where a prune stage asks for an allocation; recorded for a resume."""
    wanted = {
        name: task
        for name, task in plan.tasks.items()
        if task.prune is not None and not task.pruned and task.prune.allocation != "uniform"
    }
    if not wanted:
        return
    record = directory.record(PART)
    if record is None:
        scores = _scores(plan, directory, wanted, reporter, spill)
        record = {"sparsity": _sparsities(plan.context.streamed, wanted, scores)}
        directory.commit(PART, record)
    for name, task in wanted.items():
        task.sparsity = record["sparsity"][name]


def _sparsities(
    streamed: StreamedModel, wanted: Mapping[str, LayerTask], scores: Mapping[str, float]
) -> dict[str, float]:
    """Sparsity of each layer; those of one prune stage meet its target together."""
    stages: dict[int | None, list[str]] = {}
    for name, task in wanted.items():
        stages.setdefault(task.prune_stage, []).append(name)
    found: dict[str, float] = {}
    for names in stages.values():
        sizes = [get_matrix(streamed.model.get_submodule(name)).numel() for name in names]
        target = wanted[names[0]].prune.target_sparsity
        found |= dict(zip(names, allocate([scores[name] for name in names], sizes, target), strict=True))
    return found


def _scores(
    plan: WeightPlan, directory: RunDirectory, wanted: dict[str, LayerTask], reporter: Reporter, spill: bool
) -> dict[str, float]:
    """Importance of each layer, in one pass over the blocks."""
    streamed, batches = plan.context.streamed, plan.context.batches
    outside = sorted(name for name in wanted if not streamed.is_inside(name))
    if outside:
        raise CompressError(f"{outside[0]} is in no block: give it a prune stage of its own with allocation: uniform")
    states = HiddenStates(len(batches), directory.work / "hidden-allocation" if spill else None)
    with streamed.outside(head=False):
        streamed.prelude(batches, states)
    reporter.phase("allocate", len(streamed.blocks))
    scores: dict[str, float] = {}
    for index in range(len(streamed.blocks)):
        prefix = streamed.block_prefix(index)
        here = {name: task for name, task in wanted.items() if name.startswith(prefix)}
        with streamed.loaded_block(index) as block:
            if here:
                seen = _seen(streamed, index, states, batches, list(here))
                for kind in sorted({task.prune.allocation for task in here.values()}):
                    tasks = {name: task for name, task in here.items() if task.prune.allocation == kind}
                    weights = {name: get_matrix(block.get_submodule(name.removeprefix(prefix))) for name in tasks}
                    scores |= SCORES[kind](weights, seen, next(iter(tasks.values())).prune.target_sparsity)
            with torch.inference_mode():
                for number, batch in enumerate(batches):
                    states.put(number, streamed.advance(index, states.get(number), batch))
        reporter.step(f"block {index} scored")
    states.drop()
    return scores


def _seen(
    streamed: StreamedModel, index: int, states: HiddenStates, batches: list[Batch], names: list[str]
) -> dict[str, Statistics]:
    """Statistics of the inputs of a block's layers."""
    block, prefix = streamed.blocks[index], streamed.block_prefix(index)
    runs = forwards(streamed, index, states, batches)
    groups = find_groups(block, runs[0][0], [name.removeprefix(prefix) for name in names])
    found = collect(block, groups, runs, hessian=False)
    seen = {prefix + m: s for group, s in zip(groups, found, strict=True) for m in group.members}
    unreached = sorted(set(names) - set(seen))
    if unreached:
        raise CompressError(f"{unreached[0]}: the calibration data never reached this layer; ignore it in the recipe")
    return seen
