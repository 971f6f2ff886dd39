"""Sparsity of each layer where a recipe does not want the same for all: one pass over the uncompressed blocks, before the real one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.core.statistics import Statistics
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import collect, find_groups, forwards
from compress.model.streamed import Batch, StreamedModel
from compress.weights.layer_task import LayerTask
from compress.weights.plan import WeightPlan
from runtime.errors import CompressError
from runtime.modeling.linear_modules import get_matrix

PART = "allocation"
#: How far a layer may lie from the target (the lambda of the OWL paper).
SPREAD = 0.08
#: A weight whose importance is this many times the layer's mean is an outlier (the M of the OWL paper).
OUTLIER = 5.0


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
        stages: dict[int | None, list[str]] = {}  # the layers of one meet its target together
        for name, task in wanted.items():
            stages.setdefault(task.prune_stage, []).append(name)
        found: dict[str, float] = {}
        for names in stages.values():
            sizes = [get_matrix(plan.context.streamed.model.get_submodule(name)).numel() for name in names]
            target = wanted[names[0]].prune.target_sparsity
            found |= dict(zip(names, allocate([scores[name] for name in names], sizes, target), strict=True))
        record = {"sparsity": found}
        directory.commit(PART, record)
    for name, task in wanted.items():
        task.sparsity = record["sparsity"][name]


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
                weights = {name: get_matrix(block.get_submodule(name.removeprefix(prefix))) for name in here}
                owl = [name for name, task in here.items() if task.prune.allocation == "owl"]
                # All layers of a block share its score of outliers, as in the paper.
                scores |= dict.fromkeys(owl, outlier_score([weights[n] for n in owl], [seen[n] for n in owl]))
                others = [name for name in here if name not in owl]
                for name in others:
                    target = here[others[0]].prune.target_sparsity
                    scores[name] = error_score(weights[name], seen[name], target)
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


def allocate(scores: Sequence[float], sizes: Sequence[int], target: float) -> list[float]:
    """Sparsity of every layer: the higher its score, the fewer weights are removed.

    Args:
        scores: importance of each layer, any scale; equal scores give the target everywhere.
        sizes: weights of each layer.
        target: sparsity wanted over all weights, in [0, 1).

    Returns:
        Sparsities in [0, 1), each within `SPREAD` of the target; their mean weighted by size is the target.
    """
    # Nothing may leave [0, 1): the room on the nearer side limits both.
    spread = min(SPREAD, target, (1 - target) * 0.999)
    value = torch.tensor(scores, dtype=torch.float64)
    weight = torch.tensor(sizes, dtype=torch.float64)
    weight /= weight.sum()
    low, high = float(value.min()), float(value.max())
    if not high > low or spread <= 0:
        return [target] * len(scores)
    # Centre the removal (high score = negative), then shrink it until the farthest layer is `spread` away.
    removal = (high - value) / (high - low)
    removal -= (removal * weight).sum()
    removal *= spread / removal.abs().max()
    # Rounding may leave a layer with all its room used a hair below zero.
    return [max(0.0, float(x)) for x in target + removal]


def outlier_score(weights: Sequence[torch.Tensor], statistics: Sequence[Statistics]) -> float:
    """Layer-wise outlier distribution (Yin et al., OWL, arXiv 2310.05175): percentage of outliers in `|w| * ||x||`.

    Args:
        weights: `[out_i, in_i]` of the layers that share one sparsity (in the paper: those of a block).
        statistics: of the input of each.
    """
    outliers = total = 0
    for weight, seen in zip(weights, statistics, strict=True):
        importance = weight.detach().to(torch.float32).abs() * seen.square_mean.sqrt()
        outliers += int((importance > OUTLIER * importance.mean()).sum())
        total += importance.numel()
    return 100.0 * outliers / max(total, 1)


def error_score(weight: torch.Tensor, statistics: Statistics, sparsity: float) -> float:
    """Share of the layer's output energy that goes with the least important weights (by `|w| * ||x||`) at this sparsity."""
    energy = weight.detach().to(torch.float32).square() * statistics.square_mean
    count = round(sparsity * energy.numel())
    if count == 0:
        return 0.0
    threshold = energy.flatten().kthvalue(count).values
    return float(energy[energy <= threshold].sum() / energy.sum().clamp(min=1e-30))
