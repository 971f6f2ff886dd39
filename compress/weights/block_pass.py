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
from compress.core.statistics import SAMPLES, Statistics, StatisticsCollector
from compress.core.tensors import finite, wide_products
from compress.model.checkpoint_writer import shard_name
from compress.model.hidden_states import HiddenStates
from compress.model.input_statistics import forwards
from compress.model.module_outputs import ModuleOutputs
from compress.model.original_block import OriginalBlock
from compress.model.output_hessians import BackwardPass, OutputHessians, states_per_token
from compress.model.streamed import Batch, StreamedModel
from compress.model.tensor_model import same_input
from compress.quantize.transforms import Basis
from compress.weights.block import BlockJob, BlockResult
from compress.weights.layer_task import LayerTask
from compress.weights.packed_layer import share_inputs, solve_layers
from compress.weights.plan import WeightPlan
from compress.weights.shard import write_shard
from runtime.modeling.experts import expert_of
from runtime.modeling.linear_modules import get_matrix, is_matrix
from runtime.system.memory import return_memory

OUTPUT_HESSIANS = "output-hessians"


@dataclass
class BlockPass:
    """A pass over the blocks, in one of the processes that share it.

    Attributes:
        directory: of the run; only the main process writes shards and records.
        done: blocks that are finished.
        batches: of calibration text, and the probe.
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
        probe: list[Batch] = [(context.probe, None)] if self.streamed.runs else []
        self.batches = [*context.batches, *probe] if self.plan.needs else probe

    @property
    def streamed(self) -> StreamedModel:
        """The model."""
        return self.plan.context.streamed

    @property
    def calibrated(self) -> list[int]:
        """Numbers of the calibration batches that this process reads."""
        return self.team.mine(len(self.batches) - 1)

    @property
    def own(self) -> list[int]:
        """Numbers of the batches that this process reads; the last one, the probe, is the main one's."""
        last = len(self.batches) - 1
        return [*self.calibrated, *([last] if self.team.is_main and last >= 0 else [])]

    @property
    def propagated(self) -> bool:
        """Whether hidden states of the original model go through the blocks too."""
        return "drift" in self.plan.needs

    def new_states(self, scratch: Path | None) -> HiddenStates:
        """Room for the hidden states of all batches; those of the original model follow, as `original_state` numbers them."""
        return HiddenStates(self._states, scratch, self.team)

    def load_states(self, scratch: Path | None) -> HiddenStates:
        """The hidden states that enter the first block that is not done."""
        own = [*self.own, *(map(self.original_state, self.calibrated) if self.propagated else ())]
        return HiddenStates.load(self.directory.hidden_path(self.done), self._states, scratch, self.team, own)

    def original_state(self, number: int) -> int:
        """Number of the original model's hidden states of a calibration batch."""
        return len(self.batches) + number

    @property
    def _states(self) -> int:
        return 2 * len(self.batches) - 1 if self.propagated else len(self.batches)

    @property
    def output_hessians(self) -> OutputHessians:
        """Of the original model, where the loss counts."""
        return OutputHessians(self.directory.work / OUTPUT_HESSIANS)

    def commit(self, part: str, record: dict[str, Any], *files: Path) -> None:
        """Record a part with its shard and further files."""
        record |= {"processes": self.team.size} if self.team.size > 1 else {}
        shard = self.directory.path / record["shard"]
        self.directory.commit(part, record, (shard, *files), {shard: record["sha256"]})


@wide_products()
def run_pass(job: BlockPass) -> None:
    """Compress the remaining blocks, then what is in none; the records of all parts are in the directory's work."""
    directory, reporter, batches, streamed = job.directory, job.reporter, job.batches, job.streamed
    if "gradients" in job.plan.needs:
        collect_output_hessians(job)
    outside, count = bool(job.plan.outside), len(streamed.blocks)
    reporter.phase("compress", count + 1, job.done)
    if job.done:
        reporter.info(f"resuming at block {job.done} of {count}")
    if outside or streamed.runs:
        streamed.load_outside(head=outside)
    scratch = directory.work / "hidden-next" if job.spill else None
    states = job.load_states(scratch) if job.done and streamed.runs else job.new_states(scratch)
    if job.propagated and not job.done:
        streamed.prelude(batches, states, job.calibrated)
        for number in job.calibrated:
            states.put(job.original_state(number), states.get(number))
    embeddings = compress_embeddings(job)
    if not job.done:
        streamed.prelude(batches, states, job.own)
    if not outside:
        if job.done:  # the prelude, which a resumed run skips, records how blocks are called
            for number in job.own:
                streamed.block_kwargs(batches[number], min(job.done, count - 1))
        streamed.release_outside()
    for index in range(job.done, count):
        record = run_block(job, index, states)
        return_memory()  # what was solved is freed only now
        kept = [directory.hidden_path(index + 1)] if streamed.runs else []
        for place in kept:
            states.persist(place)
        if record is not None:
            job.commit(_part(index), record, *kept)
            # The states that entered this block stay: if those after it are damaged, it is run again.
            shutil.rmtree(directory.hidden_path(index - 1), ignore_errors=True)
            reporter.step(f"block {index}: {_summary(record['layers'])}")
            errors = {layer["name"].partition(f".{index}.")[2]: layer["error"] for layer in record["layers"]}
            reporter.tracking.log({"block": index, "layer_error": errors})
    last = compress_outside(job, embeddings, states)
    if outside:  # `evaluate` runs the original in this model too, and reads its embeddings again
        streamed.release_outside()
    if last is not None:
        job.commit("outside", last)
        reporter.step("embeddings, final norm and head")


def collect_output_hessians(job: BlockPass) -> None:
    """Write the output Hessians of the layers that ask for them, unless a run before has."""
    directory, streamed, found, team = job.directory, job.streamed, job.output_hessians, job.team
    known = team.broadcast(
        team.is_main and directory.record(OUTPUT_HESSIANS) is not None and directory.whole(OUTPUT_HESSIANS)
    )
    if known:
        return
    if team.is_main:
        shutil.rmtree(found.directory, ignore_errors=True)
        found.directory.mkdir()
    wanted: dict[int, list[str]] = {}
    for index in range(len(streamed.blocks)):
        prefix = streamed.block_prefix(index)
        names = [name for name, task in job.plan.of_block(index).items() if task.output_aware]
        wanted[index] = [n.removeprefix(prefix) for n in names if expert_of(streamed.model, n) is None]
    if not any(wanted.values()):
        return
    job.reporter.phase("output Hessians", len(streamed.blocks))
    batches, scratch = job.batches[:-1], directory.work / "hidden-backward" if job.spill else None
    states = HiddenStates(states_per_token(len(streamed.blocks)) * len(batches), scratch, team)
    place = partial(job.plan.context.bounds.place, directory.work)
    back = BackwardPass(streamed, batches, job.calibrated, states, team, place)
    for index in back.run(wanted, found):
        job.reporter.step(f"block {index}")
    team.meet()
    if team.is_main:
        directory.commit(OUTPUT_HESSIANS, {"tokens": job.plan.context.calibration.tokens}, (found.directory,))


def first_block(directory: RunDirectory, count: int, runs: bool = True) -> int:
    """The block to resume at: the first that is not done, or an earlier one where a finished one is damaged on the disk.

    Records of what is compressed again are removed.

    Args:
        count: number of blocks. runs: hidden states go through them, and those that enter the block must be there too.
    """

    def shard(index: int) -> Path:
        record = directory.record(_part(index))
        assert record is not None
        return directory.path / str(record["shard"])

    done = next((i for i in range(count) if directory.record(_part(i)) is None), count)
    start = next((i for i in range(done) if not directory.whole(_part(i), shard(i))), done)
    if start < done:
        directory.warn(f"{shard(start)} is not as it was written: what is damaged is compressed again")
    while runs and start and not directory.whole(_part(start - 1), directory.hidden_path(start)):
        directory.warn(
            f"the hidden states before block {start} are damaged or gone: going back to those before block {start - 1}"
        )
        start -= 1
    for index in range(start, done):
        directory.forget(_part(index))
    if directory.record("outside") is not None and not (start == count and directory.whole("outside")):
        directory.forget("outside")
    return start


def _part(index: int) -> str:
    return f"block-{index:05d}"


def _summary(layers: list[dict[str, Any]]) -> str:
    known = [layer for layer in layers if layer["error"] is not None]
    if not known:
        return "stored as it was trained" if layers else "copied"
    worst = max(known, key=lambda layer: layer["error"])
    return f"worst layer {worst['name']} error {worst['error']:.2e}"


# ------------------------------------------------------------ the blocks
def run_block(job: BlockPass, index: int, states: HiddenStates) -> dict[str, Any] | None:
    """Compress a block and advance the hidden states; its record once its shard is written, None in processes that do not write."""
    plan, batches, streamed = job.plan, job.batches, job.streamed
    context, prefix = plan.context, streamed.block_prefix(index)
    with streamed.loaded_block(index) as block, _modules_restored(block):
        outputs, original = ModuleOutputs(block, len(batches), keep=not job.spill), None
        if job.propagated:
            original = OriginalBlock(
                streamed, index, block, states, batches, job.calibrated, job.original_state(0), keep=not job.spill
            )
        runs = forwards(streamed, index, states, batches, job.calibrated)
        result = BlockJob(
            prefix=prefix, block=block, tasks=plan.of_block(index),
            forwards=outputs.around(runs, job.calibrated), outputs=outputs,
            small_forward=_small_forward(job, index, states), dtype=streamed.dtype, recipe=context.recipe, reporter=job.reporter,
            constraints=plan.constraints, team=job.team, place=partial(context.bounds.place, job.directory.work),
            original=original, output_hessian=partial(job.output_hessians.get, index),
        ).run()  # fmt: skip
        if original is not None:
            original.advance()
            original = None
        with torch.inference_mode():
            for number in job.own:
                with outputs.reused(number):
                    states.put(number, streamed.advance(index, states.get(number), batches[number]))
        outputs.drop()
        if not job.team.is_main:
            return None
        changed = {
            prefix + n: p.data
            for n, p in block.named_parameters()
            if n.rpartition(".")[0] in result.scaled and (prefix + n).removesuffix(".weight") not in result.layers
        }
        shard = shard_name(index + 1, len(streamed.blocks) + 1)
        return write_shard(job.directory.path / shard, context.checkpoint, streamed.block_names(index), changed, result)


@contextmanager
def _modules_restored(block: nn.Module) -> Iterator[None]:
    """Layers that are replaced inside, to simulate quantized inputs, are put back: the block runs as the source later."""
    original = {name: module for name, module in block.named_modules() if is_matrix(module)}
    try:
        yield
    finally:
        for name, module in original.items():
            parent_name, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(parent_name), leaf, module)


def _small_forward(job: BlockPass, index: int, states: HiddenStates) -> Callable[[torch.dtype], torch.Tensor] | None:
    """Runs the block over the first row of the first batch, which is the main process's, in a given dtype (folding is tried in float32);
    None where nothing runs it."""
    if not job.streamed.runs:
        return None
    ids, mask = job.batches[0]
    shared = None
    if job.team.size > 1:
        shared = job.team.broadcast(states.get(0)[:1].cpu() if job.team.is_main else None)
    batch = (ids[:1], mask[:1] if mask is not None else None)
    job.streamed.block_kwargs(batch, index)  # now, since finding them may run the block, which hooks may watch later

    def run(dtype: torch.dtype) -> torch.Tensor:
        state = states.get(0)[:1] if shared is None else shared
        return job.streamed.run_block(index, state, batch, dtype)

    return run


# ------------------------------------------------------------ outside of the blocks
def compress_embeddings(job: BlockPass) -> BlockResult:
    """Solve the embeddings the recipe names (no data is needed) and put them in place, before anything runs through them."""
    result = BlockResult()
    for name, module in _outside(job, result).items():
        if isinstance(module, nn.Embedding):
            _solve_outside(job, name, job.plan.tasks[name], module, None, result)
            if name in result.layers:
                module.weight.data = result.layers[name].dense.to(module.weight.device)
    return result


def compress_outside(job: BlockPass, result: BlockResult, states: HiddenStates) -> dict[str, Any] | None:
    """Solve what is left (the output head), write the last shard, and return its record; None in processes that only share statistics."""
    plan, context, streamed = job.plan, job.plan.context, job.streamed
    left = {name: module for name, module in _outside(job, result).items() if not isinstance(module, nn.Embedding)}
    tasks = {name: plan.tasks[name] for name in left}
    for names in [[name] for name in left] if streamed.runs else same_input(left):
        first, weights = names[0], {name: get_matrix(left[name]) for name in names}
        statistics = _head_statistics(job, tasks[first], left[first], states) if tasks[first].needs else None
        if statistics is not None and not statistics.finite:
            result.skip_nonfinite(first, "its calibration inputs hold", context.recipe)
            continue
        shared, bases = share_inputs({name: tasks[name] for name in names}, weights, statistics, job.team)
        for name in names if job.team.is_main else ():
            _solve_outside(job, name, shared[name], left[name], statistics, result, bases.get(name))
    if not job.team.is_main:
        return None
    changed = {}
    if plan.untie:
        for name in (name for tied in streamed.ties.items() for name in tied):
            if not context.checkpoint.has(name) and name.rpartition(".")[0] not in result.layers:
                changed[name] = streamed.model.get_parameter(name).data.clone()
    shards = len(streamed.blocks) + 1
    shard = job.directory.path / shard_name(shards, shards)
    return write_shard(shard, context.checkpoint, streamed.outside_names(), changed, result)


def _outside(job: BlockPass, result: BlockResult) -> dict[str, nn.Module]:
    """The modules outside of the blocks that are to be compressed; those with NaN or Inf stop the run or are skipped."""
    found = {name: job.streamed.model.get_submodule(name) for name in job.plan.outside}
    for name, module in list(found.items()):
        if not finite(get_matrix(module)):
            result.skip_nonfinite(name, "the weight holds", job.plan.context.recipe)
            del found[name]
    return found


def _solve_outside(
    job: BlockPass,
    name: str,
    task: LayerTask,
    module: nn.Module,
    statistics: Statistics | None,
    result: BlockResult,
    basis: Basis | None = None,
) -> None:
    weights, dtype = [get_matrix(module)], job.streamed.dtype
    (layer,) = solve_layers({name: task}, [module], weights, statistics, dtype, job.plan.constraints, basis=basis)
    result.add_layer(name, layer, job.reporter)


def _head_statistics(job: BlockPass, task: LayerTask, module: nn.Module, states: HiddenStates) -> Statistics:
    columns, device = get_matrix(module).shape[1], job.streamed.device
    place = job.plan.context.bounds.place(job.directory.work, columns)
    samples = SAMPLES if "samples" in task.needs else 0
    collector = StatisticsCollector(columns, True, device, place, drift=task.propagated, samples=samples)

    def read(number: int, ids: torch.Tensor) -> torch.Tensor:
        return job.streamed.head_input(states.get(number).to(device), ids)

    for number in job.calibrated:
        ids, mask = job.batches[number][0], job.streamed.counted(job.batches[number])
        collector.add(read(number, ids), mask, read(job.original_state(number), ids) if task.propagated else None)
    job.team.add_up(collector)
    return collector.finish()
