"""Pass over the blocks of a checkpoint: each is compressed, written as its own shard and recorded; then embeddings and head."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.core.processes import Team
from compress.core.progress import Reporter
from compress.core.run_directory import RunDirectory
from compress.core.statistics import Statistics, StatisticsCollector
from compress.model.checkpoint_writer import shard_name
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch, StreamedModel
from compress.weights.block import BlockJob, BlockResult, compress_block, leave_nonfinite
from compress.weights.layer_work import LayerWork
from compress.weights.packed_layer import activation_tensors, pack_layer
from compress.weights.plan import WeightPlan
from compress.weights.shards import write_part
from compress.weights.solver.group import solve_group
from runtime.modeling.linear_modules import is_matrix
from runtime.system.memory import return_memory


@dataclass
class BlockPass:
    """A pass over the blocks, as one of the processes that share it does it.

    Attributes:
        directory: of the run; only the main process writes shards and records.
        done: blocks that are finished.
    """

    plan: WeightPlan
    directory: RunDirectory
    reporter: Reporter
    spill: bool
    done: int
    team: Team = field(default_factory=Team)
    batches: list[Batch] = field(init=False)

    def __post_init__(self) -> None:
        context = self.plan.context
        probe: Batch = (context.probe, None)
        self.batches = [*context.batches, probe] if self.plan.needs else [probe]

    @property
    def calibrated(self) -> list[int]:
        """Numbers of the calibration batches that are this process's."""
        return self.team.mine(len(self.batches) - 1)

    @property
    def own(self) -> list[int]:
        """Numbers of the batches that are this process's; the last one, the probe, is the main one's."""
        return [*self.calibrated, *([len(self.batches) - 1] if self.team.is_main else [])]


def run_pass(job: BlockPass) -> None:
    """Compress the blocks that are left, then what is in none; the records of all parts are in the directory's work."""
    plan, directory, reporter, batches = job.plan, job.directory, job.reporter, job.batches
    streamed = plan.context.streamed
    count = len(streamed.blocks)
    total = count + 1
    reporter.phase("compress", total, job.done)
    if job.done:
        reporter.info(f"resuming at block {job.done} of {count}")
    streamed.load_outside(head=bool(plan.outside))
    embeddings = compress_embeddings(job)
    scratch = directory.work / "hidden-next" if job.spill else None
    if job.done == 0:
        states = HiddenStates(len(batches), scratch, job.team)
        streamed.prelude(batches, states, job.own)
    else:
        states = HiddenStates.load(directory.hidden_path(job.done), len(batches), scratch, job.team, job.own)
    if not plan.outside:
        if job.done:  # a resumed run has no prelude behind it, which is what tells how blocks are called
            for number in job.own:
                streamed.block_kwargs(batches[number], min(job.done, count - 1))
        streamed.release_outside()
    for index in range(job.done, count):
        record = _one_block(job, index, states)
        return_memory()  # what was solved is freed only now
        states.persist(directory.hidden_path(index + 1))
        if record is not None:
            record |= {"processes": job.team.size} if job.team.size > 1 else {}
            holds = (directory.path / record["shard"], directory.hidden_path(index + 1))
            directory.commit(_part(index), record, holds)
            # The states that entered this block stay: if those after it are damaged, it is run again.
            _remove_hidden(directory, index - 1)
            reporter.step(f"block {index}: {_told(record['layers'])}")
    outside = compress_outside(job, embeddings, states, total)
    if outside is not None:
        outside |= {"processes": job.team.size} if job.team.size > 1 else {}
        directory.commit("outside", outside, [directory.path / outside["shard"]])
        reporter.step("embeddings, final norm and head")


def first_block(directory: RunDirectory, count: int) -> int:
    """The block to go on at: the first that is not done, or an earlier one where what was done is damaged on the disk.

    Records of what is made again are removed.
    """
    done = next((i for i in range(count) if directory.record(_part(i)) is None), count)
    start = next((i for i in range(done) if not directory.whole(_part(i), _shard(directory, i))), done)
    if start < done:
        directory.warn(f"{_shard(directory, start)} is not as it was written: what is damaged is compressed again")
    while start and not directory.whole(_part(start - 1), directory.hidden_path(start)):
        directory.warn(
            f"the hidden states before block {start} are damaged or gone: going back to those before block {start - 1}"
        )
        start -= 1
    for index in range(start, done):
        directory.forget(_part(index))
    if directory.record("outside") is not None and not (start == count and directory.whole("outside")):
        directory.forget("outside")
    return start


def _shard(directory: RunDirectory, index: int) -> Path:
    record = directory.record(_part(index))
    assert record is not None
    return directory.path / str(record["shard"])


def _told(layers: list[dict[str, Any]]) -> str:
    worst = max(
        (layer for layer in layers if layer["error"] is not None), key=lambda layer: layer["error"], default=None
    )
    if worst is None:
        return "stored as it was trained" if layers else "copied"
    return f"worst layer {worst['name']} error {worst['error']:.2e}"


def _part(index: int) -> str:
    return f"block-{index:05d}"


def _remove_hidden(directory: RunDirectory, index: int) -> None:
    shutil.rmtree(directory.hidden_path(index), ignore_errors=True)


def _one_block(job: BlockPass, index: int, states: HiddenStates) -> dict[str, Any] | None:
    """The record of a block, once it is written; None in those that do not write."""
    plan, batches = job.plan, job.batches
    context, streamed = plan.context, plan.context.streamed
    work = plan.of_block(index)
    with streamed.loaded_block(index) as block, _modules_put_back(block):
        block_job = BlockJob(
            prefix=streamed.block_prefix(index), block=block, work=work,
            forwards=[(_runner(streamed, index, states, number, batches[number]), batches[number][1]) for number in job.calibrated],
            small_forward=_small_forward(job, index, states),
            dtype=streamed.dtype, true_sequential=context.recipe.true_sequential, on_nonfinite=context.recipe.on_nonfinite,
            held=plan.held, experts=context.recipe.calibration.experts, team=job.team,
            place=partial(context.bounds.place, job.directory.work),
        )  # fmt: skip
        result: BlockResult = compress_block(block_job, job.reporter)
        with torch.inference_mode():
            for number in job.own:
                states.put(number, streamed.advance(index, states.get(number), batches[number]))
        if not job.team.is_main:
            return None
        prefix = streamed.block_prefix(index)
        changed = {
            prefix + n: p.data
            for n, p in block.named_parameters()
            if n.rpartition(".")[0] in result.scaled and (prefix + n).removesuffix(".weight") not in result.layers
        }
        return write_part(
            job.directory.path, shard_name(index + 1, len(streamed.blocks) + 1), context.checkpoint, streamed.block_names(index),
            changed, result.layers, result.skipped,
        )  # fmt: skip


@contextmanager
def _modules_put_back(block: nn.Module) -> Iterator[None]:
    """Layers that were replaced to simulate quantized inputs give way to the originals again: the block runs as the source later."""
    original = {name: module for name, module in block.named_modules() if is_matrix(module)}
    try:
        yield
    finally:
        for name, module in original.items():
            parent_name, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(parent_name), leaf, module)


def _runner(
    streamed: StreamedModel, index: int, states: HiddenStates, number: int, batch: Batch
) -> Callable[[], torch.Tensor]:
    return lambda: streamed.run_block(index, states.get(number), batch)


def _small_forward(job: BlockPass, index: int, states: HiddenStates) -> Callable[[torch.dtype], torch.Tensor]:
    """Runs the block over the first row of the first batch, which is the main process's, in a given dtype (folding is tried in float32)."""
    streamed = job.plan.context.streamed
    ids, mask = job.batches[0]
    shared = None
    if job.team.size > 1:
        shared = job.team.agreed(states.get(0)[:1].cpu() if job.team.is_main else None)
    batch = (ids[:1], mask[:1] if mask is not None else None)
    streamed.block_kwargs(
        batch, index
    )  # now, since finding them may run the block, which somebody may be watching later

    def run(dtype: torch.dtype) -> torch.Tensor:
        state = states.get(0)[:1] if shared is None else shared
        return streamed.run_block(index, state, batch, dtype)

    return run


def compress_embeddings(job: BlockPass) -> BlockResult:
    """Solve the embeddings the recipe names (no data is needed) and put them in place, before anything runs through them."""
    result = BlockResult()
    for name, work in job.plan.outside.items():
        module = job.plan.context.streamed.model.get_submodule(name)
        if isinstance(module, nn.Embedding) and _usable(job, name, module, result):
            _solve_outside(job, name, work, module, None, result)
            module.weight.data = result.layers[name].dense.to(module.weight.device)
    return result


def compress_outside(job: BlockPass, result: BlockResult, states: HiddenStates, shards: int) -> dict[str, Any] | None:
    """Solve what is left (the output head), write the last shard, and return its record; None in processes that only share statistics."""
    plan, context = job.plan, job.plan.context
    streamed = context.streamed
    for name, work in plan.outside.items():
        module = streamed.model.get_submodule(name)
        if not isinstance(module, nn.Embedding) and _usable(job, name, module, result):
            statistics = _head_statistics(job, module, states) if work.needs else None
            if job.team.is_main:
                _solve_outside(job, name, work, module, statistics, result)
    if not job.team.is_main:
        return None
    changed = {}
    if plan.untie:
        for name in (name for tied in streamed.ties.items() for name in tied):
            if not context.checkpoint.has(name) and name.rpartition(".")[0] not in result.layers:
                changed[name] = streamed.model.get_parameter(name).data.clone()
    return write_part(
        job.directory.path, shard_name(shards, shards), context.checkpoint, streamed.outside_names(), changed, result.layers,
        result.skipped,
    )  # fmt: skip


def _usable(job: BlockPass, name: str, module: nn.Module, result: BlockResult) -> bool:
    if bool(torch.isfinite(_weight(module)).all()):
        return True
    leave_nonfinite(name, f"{name}: the weight holds NaN or Inf", job.plan.context.recipe.on_nonfinite, result)
    return False


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.data


def _solve_outside(
    job: BlockPass,
    name: str,
    work: LayerWork,
    module: nn.Module,
    statistics: Statistics | None,
    result: BlockResult,
) -> None:
    problem = work.problem([name], [_weight(module)], statistics, job.plan.context.streamed.dtype, job.plan.held)
    (solved,) = solve_group(problem)
    inputs = activation_tensors(work.scheme, statistics, problem.dtype)
    result.layers[name] = pack_layer(name, work, solved, inputs, module)
    job.reporter.detail(f"{name}  error {solved.error:.3e}")


def _head_statistics(job: BlockPass, module: nn.Module, states: HiddenStates) -> Statistics:
    context, columns = job.plan.context, _weight(module).shape[1]
    device, place = context.streamed.device, context.bounds.place(job.directory.work, columns)
    collector = StatisticsCollector(columns, hessian=True, device=device, directory=place)
    for number in job.calibrated:
        ids, mask = job.batches[number]
        collector.add(context.streamed.head_input(states.get(number).to(device), ids), mask)
    job.team.add_up(collector)
    return collector.finish()
