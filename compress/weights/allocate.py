"""Allocation of sparsity and of bits where a recipe does not want the same for all layers: passes over the uncompressed blocks, before the
real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.core.knapsack import choose
from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.core.statistics import Statistics
from compress.core.tensors import wide_products
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import collect, find_groups, forwards
from compress.model.streamed import Batch, StreamedModel
from compress.weights.artifact import budget_bytes
from compress.weights.layer_task import LayerTask
from compress.weights.plan import Budget, WeightPlan
from compress.weights.sensitivity import Measurement, Unit
from runtime.errors import CompressError, RequestError
from runtime.formats.scheme import Scheme
from runtime.modeling.linear_modules import get_matrix

PART = "allocation"
#: How far a layer may lie from the target (the lambda of the OWL paper).
SPREAD = 0.08
#: A weight whose importance is this many times the layer's mean is an outlier (the M of the OWL paper).
OUTLIER = 5.0
#: Bits per weight that a budget is met within, if the layers can be combined so.
BITS_TOLERANCE = 0.02

Visit = Callable[[int, nn.Module, HiddenStates], None]
"""Called with the number of a block, the block, and the hidden states that enter it."""


def allocate(plan: WeightPlan, directory: RunDirectory, reporter: Reporter, spill: bool) -> dict[str, Any]:
    """Settle `LayerTask.sparsity` and `LayerTask.scheme` where stages ask for an allocation; recorded for a resume.

    Returns:
        What the manifest says of it: empty where no stage has a budget, else as `_chosen` has it.
    """
    record = directory.record(PART)
    if record is None:
        record = measure(plan, directory.work, reporter, spill)
        if record:
            directory.commit(PART, record)
    settle(plan, record)
    return record.get("budget", {}) if record else {}


def measure(plan: WeightPlan, work: Path, reporter: Reporter, spill: bool) -> dict[str, Any]:
    """The record of an allocation, JSON-able: {"sparsity": {layer: share}, "budget": see `_chosen`}; what no stage asks for is left out.

    Args:
        work: directory of hidden states that spill, and of second moments in files.
    """
    found: dict[str, Any] = {}
    pruned = {
        name: task
        for name, task in plan.tasks.items()
        if task.prune is not None and not task.pruned and task.prune.allocation != "uniform"
    }
    if pruned:
        found["sparsity"] = _sparsities(plan, pruned, work if spill else None, reporter)
        settle(plan, found)
    if plan.budget is not None:
        found["budget"] = _bits(plan, plan.budget, work, reporter, spill)
    return found


def settle(plan: WeightPlan, record: dict[str, Any]) -> None:
    """Give the layers of a plan what was found for them."""
    for name, share in record.get("sparsity", {}).items():
        plan.tasks[name].sparsity = share
    for unit in record.get("budget", {}).get("units", []):
        for name in unit["layers"]:
            task = plan.tasks[name]
            task.scheme, task.candidates = task.candidates[unit["candidate"]], ()
    if "budget" in record:  # what the pass will skip
        for task in plan.tasks.values():
            task.candidates = ()


@wide_products()
def _walk(plan: WeightPlan, title: str, spill: Path | None, reporter: Reporter, visit: Visit) -> HiddenStates:
    """Go through the blocks of the uncompressed model, one in memory at a time; the hidden states after the last."""
    streamed, batches = plan.context.streamed, plan.context.batches
    states = HiddenStates(len(batches), spill)
    # The output of an encoder goes through what is in no block on its way to the decoder.
    with streamed.outside() if len(streamed.stacks) > 1 else nullcontext():
        with streamed.outside(head=False):
            streamed.prelude(batches, states)
        reporter.phase("allocate", len(streamed.blocks))
        for index in range(len(streamed.blocks)):
            with streamed.loaded_block(index) as block:
                visit(index, block, states)
                with torch.inference_mode():
                    for number, batch in enumerate(batches):
                        states.put(number, streamed.advance(index, states.get(number), batch))
            reporter.step(f"block {index} {title}")
    return states


# ------------------------------------------------------------ bits
def _bits(plan: WeightPlan, budget: Budget, work: Path, reporter: Reporter, spill: bool) -> dict[str, Any]:
    """Measure the units and choose."""
    measurement = Measurement(plan, budget, work, spill)
    states = _walk(plan, "measured", work / "hidden-allocation" if spill else None, reporter, measurement.visit)
    measurement.finish(states)
    states.drop()
    return _chosen(budget, plan, measurement.units)


def _chosen(budget: Budget, plan: WeightPlan, units: list[Unit]) -> dict[str, Any]:
    """The schemes of the units that keep to a budget, and lose or take the least.

    Returns:
        {"key", "amount": of the budget; "bits": per weight, as stored; "bytes": of the layers; "kl": predicted;
        "units": [{"layers", "candidate": its number, "scheme", "bits", "weights", "kl"}]}.
    """
    if not units:
        raise CompressError(
            f"{budget.key}: no layer that shares the budget can be measured: its weights or inputs hold NaN or Inf"
        )
    sizes, losses = [unit.sizes for unit in units], [unit.predicted() for unit in units]
    weights = sum(unit.weights for unit in units)
    allowed = budget_bytes(plan, budget, [name for unit in units for name in unit.layers])
    if allowed is None:
        with plan.context.recipe.origin.located(budget.path):
            picks = _smallest(sizes, losses, budget.amount)
    else:
        try:
            picks = choose(sizes, losses, allowed, allowed - int(BITS_TOLERANCE * weights / 8))
        except ValueError as error:
            text = plan.context.recipe.origin.at(budget.path, f"{error} bytes, as the layers are stored; allow more")
            raise CompressError(text) from None
    found = [
        {
            "layers": unit.layers, "candidate": pick, "scheme": _describe(unit.candidates[pick]),
            "bits": 8 * unit.sizes[pick] / unit.weights, "weights": unit.weights, "kl": lost[pick],
        }
        for unit, pick, lost in zip(units, picks, losses, strict=True)
    ]  # fmt: skip
    total = sum(own[pick] for own, pick in zip(sizes, picks, strict=True))
    return {
        "key": budget.key, "amount": budget.amount, "bits": 8 * total / weights, "bytes": total,
        "kl": sum(unit["kl"] for unit in found), "units": found,
    }  # fmt: skip


def _smallest(sizes: list[list[int]], losses: list[list[float]], most: float) -> list[int]:
    """The options of the least total size whose losses add up to at most `most`, by bisection; RequestError where there are none."""
    low, high = sum(map(min, sizes)), sum(map(max, sizes))

    def lost(picks: list[int]) -> float:
        return sum(own[pick] for own, pick in zip(losses, picks, strict=True))

    best = choose(sizes, losses, high)
    if lost(best) > most:
        raise RequestError(
            f"{most:g} cannot be met: {lost(best):.3g} is predicted with the largest candidate everywhere; allow more, or "
            "give candidates of more bits"
        )
    while high - low > max(1, high // 10**4):
        middle = (low + high) // 2
        picks = choose(sizes, losses, middle)
        if lost(picks) <= most:
            best, high = picks, middle
        else:
            low = middle
    return best


def _describe(scheme: Scheme) -> str:
    assert scheme.weights is not None
    return scheme.weights.describe()


# ------------------------------------------------------------ sparsity
def _sparsities(
    plan: WeightPlan, wanted: dict[str, LayerTask], spill: Path | None, reporter: Reporter
) -> dict[str, float]:
    """Sparsity of each layer; those of one stage meet its target together."""
    streamed = plan.context.streamed
    outside = sorted(name for name in wanted if not streamed.is_inside(name))
    if outside:
        raise CompressError(f"{outside[0]} is in no block: give it a prune stage of its own with allocation: uniform")
    scores: dict[str, float] = {}

    def visit(index: int, block: nn.Module, states: HiddenStates) -> None:
        prefix = streamed.block_prefix(index)
        here = {name: task for name, task in wanted.items() if name.startswith(prefix)}
        if not here:
            return
        seen = _seen(streamed, index, states, plan.context.batches, list(here))
        weights = {name: get_matrix(block.get_submodule(name.removeprefix(prefix))) for name in here}
        owl = [name for name, task in here.items() if task.prune.allocation == "owl"]
        # All layers of a block share its score of outliers, as in the paper.
        scores.update(dict.fromkeys(owl, outlier_score([weights[n] for n in owl], [seen[n] for n in owl])))
        others = [name for name in here if name not in owl]
        for name in others:
            scores[name] = error_score(weights[name], seen[name], here[others[0]].prune.target_sparsity)

    _walk(plan, "scored", spill and spill / "hidden-allocation", reporter, visit).drop()
    stages: dict[int | None, list[str]] = {}
    for name, task in wanted.items():
        stages.setdefault(task.prune_stage, []).append(name)
    found: dict[str, float] = {}
    for names in stages.values():
        sizes = [get_matrix(streamed.model.get_submodule(name)).numel() for name in names]
        target = wanted[names[0]].prune.target_sparsity
        found |= dict(zip(names, spread([scores[name] for name in names], sizes, target), strict=True))
    return found


def _seen(
    streamed: StreamedModel, index: int, states: HiddenStates, batches: list[Batch], names: list[str]
) -> dict[str, Statistics]:
    """Statistics of the inputs of a block's layers."""
    block, prefix = streamed.blocks[index], streamed.block_prefix(index)
    runs = forwards(streamed, index, states, batches)
    groups = find_groups(block, runs[0][0], [name.removeprefix(prefix) for name in names])
    found = collect(block, groups, runs, needs=())
    seen = {prefix + m: s for group, s in zip(groups, found, strict=True) for m in group.members}
    unreached = sorted(set(names) - set(seen))
    if unreached:
        raise CompressError(f"{unreached[0]}: the calibration data never reached this layer; ignore it in the recipe")
    return seen


def spread(scores: Sequence[float], sizes: Sequence[int], target: float) -> list[float]:
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
