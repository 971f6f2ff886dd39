"""The part of a model that is in no block: embeddings, final norm, output head. Copied, unless the recipe names them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compress.core.method import Problem
from compress.core.processes import Share
from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.core.statistics import Statistics, StatisticsCollector
from compress.model.checkpoint_writer import shard_name
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch
from compress.weights.layer_work import LayerWork
from compress.weights.packed_layer import SolvedLayer, activation_tensors, pack_layer
from compress.weights.plan import WeightPlan
from compress.weights.shards import write_part
from compress.weights.solver.group import solve_group
from runtime.errors import CompressError


@dataclass
class Outside:
    """What became of the layers the recipe names outside of the blocks."""

    layers: dict[str, SolvedLayer] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def compress_embeddings(plan: WeightPlan, reporter: Reporter) -> Outside:
    """Solve the embeddings the recipe names (no data is needed) and put them in place, before anything runs through them."""
    outside = Outside()
    for name, work in plan.outside.items():
        module = plan.context.streamed.model.get_submodule(name)
        if isinstance(module, nn.Embedding) and _usable(plan, name, module, outside):
            _solve(plan, name, work, module, None, outside, reporter)
            module.weight.data = outside.layers[name].dense.to(module.weight.device)
    return outside


def compress_outside(
    plan: WeightPlan,
    outside: Outside,
    states: HiddenStates,
    batches: list[Batch],
    shards: int,
    directory: RunDirectory,
    reporter: Reporter,
    share: Share,
) -> dict[str, Any] | None:
    """Solve what is left (the output head), write the last shard, and return its record; None in processes that only share statistics."""
    streamed = plan.context.streamed
    for name, work in plan.outside.items():
        module = streamed.model.get_submodule(name)
        if not isinstance(module, nn.Embedding) and _usable(plan, name, module, outside):
            statistics = _head_statistics(plan, name, module, states, batches, share, directory) if work.needs else None
            if share.is_main:
                _solve(plan, name, work, module, statistics, outside, reporter)
    if not share.is_main:
        return None
    changed = {}
    if plan.untie:
        for tied, source in streamed.ties.items():
            for name in (tied, source):
                if not plan.context.checkpoint.has(name) and name.rpartition(".")[0] not in outside.layers:
                    changed[name] = streamed.model.get_parameter(name).data.clone()
    return write_part(
        directory.path,
        shard_name(shards, shards),
        plan.context.checkpoint,
        streamed.outside_names(),
        changed,
        outside.layers,
        outside.skipped,
    )


def _usable(plan: WeightPlan, name: str, module: nn.Module, outside: Outside) -> bool:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if bool(torch.isfinite(weight).all()):
        return True
    if plan.context.recipe.on_nonfinite == "fail":
        raise CompressError(f"{name}: the weight holds NaN or Inf; repair the checkpoint, or set on_nonfinite: skip")
    outside.skipped[name] = f"{name}: the weight holds NaN or Inf"
    return False


def _solve(
    plan: WeightPlan,
    name: str,
    work: LayerWork,
    module: nn.Module,
    statistics: Statistics | None,
    outside: Outside,
    reporter: Reporter,
) -> None:
    weight, dtype = module.weight, plan.context.streamed.dtype
    assert isinstance(weight, torch.Tensor)
    shares = [work.share] if work.prune is not None else None
    held = work.hold([plan.held.get(name)])
    problem = Problem(
        [weight.data], statistics, work.prune, work.quantize, work.scheme, dtype, [name], shares, held
    )  # fmt: skip
    solved = solve_group(problem)[0]
    outside.layers[name] = pack_layer(name, work, solved, activation_tensors(work.scheme, statistics, dtype), module)
    reporter.detail(f"{name}  error {solved.error:.3e}")


def _head_statistics(
    plan: WeightPlan,
    name: str,
    module: nn.Module,
    states: HiddenStates,
    batches: list[Batch],
    share: Share,
    directory: RunDirectory,
) -> Statistics:
    columns = int(module.weight.shape[1])  # type: ignore[union-attr, index]
    place = plan.context.bounds.place(directory.work, columns)
    collector = StatisticsCollector(columns, hessian=True, device=plan.context.streamed.device, directory=place)
    for number in share.mine(len(batches) - 1):  # the last batch is the probe
        ids, mask = batches[number]
        collector.add(plan.context.streamed.head_input(states.get(number).to(plan.context.streamed.device), ids), mask)
    share.add_up(collector)
    return collector.finish()
