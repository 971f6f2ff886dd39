"""Sparsity of each layer where a recipe does not want the same for all: one pass over the uncompressed blocks, before the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.core.statistics import Statistics
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import collect, find_groups
from compress.prune.allocation import allocate, error_score, outlier_score
from compress.weights.layer_work import LayerWork
from compress.weights.plan import WeightPlan
from runtime.errors import CompressError

PART = "allocation"
Weights = Mapping[str, torch.Tensor]


def _owl(weights: Weights, seen: Mapping[str, Statistics], target: float) -> dict[str, float]:
    """All layers of a block share its score, as in the paper."""
    score = outlier_score(list(weights.values()), [seen[name] for name in weights])
    return dict.fromkeys(weights, score)


def _error(weights: Weights, seen: Mapping[str, Statistics], target: float) -> dict[str, float]:
    return {name: error_score(weight, seen[name], target) for name, weight in weights.items()}


SCORES: dict[str, Callable[[Weights, Mapping[str, Statistics], float], dict[str, float]]] = {
    "owl": _owl,
    "error": _error,
}


def allocate_sparsity(plan: WeightPlan, directory: RunDirectory, reporter: Reporter, spill: bool) -> None:
    """Set `LayerWork.sparsity` where a prune stage asks for an allocation; remembered for a resume."""
    wanted = {name: work for name, work in plan.work.items() if _allocation(work) != "uniform"}
    if not wanted:
        return
    record = directory.record(PART)
    if record is None:
        record = {"sparsity": _compute(plan, directory, wanted, reporter, spill)}
        directory.commit(PART, record)
    for name, work in wanted.items():
        work.sparsity = record["sparsity"][name]


def _allocation(work: LayerWork) -> str:
    return "uniform" if work.prune is None or work.pruned else str(work.prune.allocation)


def _compute(
    plan: WeightPlan, directory: RunDirectory, wanted: dict[str, LayerWork], reporter: Reporter, spill: bool
) -> dict[str, float]:
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
        here = {name: work for name, work in wanted.items() if name.startswith(prefix)}
        with streamed.loaded_block(index) as block:

            def run(number: int, index: int = index) -> torch.Tensor:
                return streamed.run_block(index, states.get(number), batches[number])

            if here:
                groups = find_groups(block, lambda: run(0), [name.removeprefix(prefix) for name in here])
                forwards = [(lambda number=n: run(number), batch[1]) for n, batch in enumerate(batches)]
                found = collect(block, groups, forwards, hessian=False)
                seen = {prefix + m: s for group, s in zip(groups, found, strict=True) for m in group.members}
                unreached = sorted(set(here) - set(seen))
                if unreached:
                    raise CompressError(
                        f"{unreached[0]}: the calibration data never reached this layer; ignore it in the recipe"
                    )
                for kind in sorted({_allocation(work) for work in here.values()}):
                    names = [name for name, work in here.items() if _allocation(work) == kind]
                    weights = {name: _weight(block, name.removeprefix(prefix)) for name in names}
                    scores |= SCORES[kind](weights, seen, here[names[0]].prune.target_sparsity)
            with torch.inference_mode():
                for number, batch in enumerate(batches):
                    states.put(number, streamed.advance(index, states.get(number), batch))
        reporter.step(f"block {index} scored")
    states.drop()
    shares: dict[str, float] = {}
    for stage in sorted({id(work.prune) for work in wanted.values()}, key=lambda key: _first(wanted, key)):
        names = [name for name, work in wanted.items() if id(work.prune) == stage]
        sizes = [streamed.model.get_submodule(name).weight.numel() for name in names]  # type: ignore[union-attr, operator]
        target = wanted[names[0]].prune.target_sparsity
        shares |= dict(zip(names, allocate([scores[name] for name in names], sizes, target), strict=True))
    return shares


def _first(wanted: dict[str, LayerWork], key: int) -> int:
    return next(position for position, work in enumerate(wanted.values()) if id(work.prune) == key)


def _weight(block: nn.Module, name: str) -> torch.Tensor:
    weight = block.get_submodule(name).weight
    assert isinstance(weight, torch.Tensor)
    return weight.data
