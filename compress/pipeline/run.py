"""`apply`: one pass over the blocks of a checkpoint, each written as its own shard; then the rest, the gate, and the numbers."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.pipeline import finish, gate
from compress.pipeline.allocate import allocate_sparsity
from compress.pipeline.block import BlockJob, BlockResult, compress_block
from compress.pipeline.cache import calibrated_policy
from compress.pipeline.cache_eval import evaluate_cache, too_large
from compress.pipeline.directory import LOG, RunDirectory
from compress.pipeline.draft import check_same_draft, make_draft
from compress.pipeline.files import disk_errors
from compress.pipeline.hidden import HiddenStates
from compress.pipeline.outside import compress_embeddings, compress_outside
from compress.pipeline.passes import Passes
from compress.pipeline.plan import plan_session
from compress.pipeline.progress import Reporter
from compress.pipeline.session import Session
from compress.pipeline.shards import shard_name, write_part
from compress.pipeline.stream import Batch, StreamedModel
from compress.recipe.models import Recipe
from runtime.artifact import Artifact
from runtime.errors import CompressError, RequestError


@dataclass
class AppliedArtifact:
    """What `apply` gives back.

    Attributes:
        path: directory of the artifact.
        metrics: quality, sizes and limits, as in the manifest.
        manifest: content of compress.json.
        seconds: wall-clock time of each phase of this run (a resumed run counts only what it did itself).
        peak_memory: largest resident memory of the process, in bytes.
    """

    path: Path
    metrics: dict[str, Any]
    manifest: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    warnings: list[str] = field(default_factory=list)


def apply(
    recipe: Recipe,
    *,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> AppliedArtifact:
    """Run a recipe.

    Args:
        output: directory to write; default the recipe's.
        resume: continue an unfinished run in `output`; the result has the same bytes as an uninterrupted one.
        overwrite: replace a finished artifact or an unfinished run of this tool in `output`.
        device: where blocks run: auto, cpu, cuda, cuda:1.

    Raises:
        RequestError: the request cannot be carried out (nothing was changed). CompressError: it failed on the way; what was
            finished stays, and --resume goes on from there. A limit of `evaluate` that is exceeded is a CompressError too,
            raised after the artifact is complete.
    """
    directory_path = Path(output) if output is not None else recipe.output_directory
    torch.manual_seed(recipe.seed)
    clock = _Clock()
    passes = Passes.open(recipe, device)
    session = passes.session
    evaluation = finish.evaluation_windows(session)
    identity = session.identity(evaluation)
    directory = RunDirectory(directory_path, identity, resume, overwrite)
    if directory.finished:
        manifest = finish.read_manifest(directory)
        check_same_draft(session, manifest, directory.path)
        Artifact(directory.path).verify()
        directory.finish()
        return _accept(AppliedArtifact(directory.path, manifest["metrics"], manifest, clock.seconds, _peak()))
    plan = plan_session(session, evaluation, directory.path)
    if plan.problems:
        raise RequestError("; ".join(plan.problems))
    directory.claim()
    clock.lap("prepare")

    with disk_errors(f"writing to {directory.path}"), Reporter(directory.path / LOG, quiet) as reporter:
        reporter.info(plan.headline())
        for warning in [
            *plan.warnings,
            too_large(session, plan.bytes_after),
            *([session.calibration.warning] if session.reads_text else []),
        ]:
            if warning:
                reporter.warn(warning)
        if passes.jobs:
            session = passes.run(directory, plan.spill, reporter)
            clock.lap("structure")
        allocate_sparsity(session, directory, reporter, plan.spill)
        _compress_blocks(session, directory, reporter, plan.spill)
        clock.lap("compress")
        finish.write_metadata(session, directory)
        artifact = gate.open_artifact(directory.path, session)
        gate.check_against_pipeline(session, artifact, directory, reporter)
        clock.lap("load back")
        metrics = finish.evaluate(session, artifact, evaluation, directory, plan.spill, reporter)
        clock.lap("evaluate")
        policy = calibrated_policy(session, directory, reporter)
        if policy is not None and policy.needs:
            clock.lap("calibrate cache")
        metrics = evaluate_cache(session, directory, evaluation, policy, metrics, reporter)
        if "kv_cache" in metrics:
            clock.lap("evaluate cache")
        draft = make_draft(session, directory, reporter)
        if draft is not None:
            clock.lap("draft")
        manifest = finish.write_manifest(session, directory, identity, metrics, policy, draft)
        directory.finish()
        result = AppliedArtifact(directory.path, metrics, manifest, clock.seconds, _peak(), reporter.warnings)
    return _accept(result)


def _accept(result: AppliedArtifact) -> AppliedArtifact:
    """The artifact, unless the recipe's limits refuse it."""
    failed = [limit for limit in result.metrics.get("limits", []) if not limit["ok"]]
    if failed:
        found = ("was not measured" if x["value"] is None else f"is {x['value']:.4g}" for x in failed)
        sentence = "; ".join(
            f"{x['name']} {text}, the limit is {x['limit']:.4g}" for x, text in zip(failed, found, strict=True)
        )
        raise LimitError(
            f"{sentence}; the artifact is complete in {result.path}, but the recipe does not accept it", result
        )
    return result


class LimitError(CompressError):
    """The artifact is complete, but worse than the recipe's `evaluate` limits allow. `result` is what `apply` would have returned."""

    def __init__(self, message: str, result: AppliedArtifact) -> None:
        super().__init__(message)
        self.result = result


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = round(now - self._last, 3)
        self._last = now


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _compress_blocks(session: Session, directory: RunDirectory, reporter: Reporter, spill: bool) -> None:
    streamed = session.streamed
    count = len(streamed.blocks)
    total = count + 1
    done = 0
    while done < count and directory.record(_part(done)) is not None:
        done += 1
    reporter.phase("compress", total, done)
    if done:
        reporter.info(f"resuming at block {done} of {count}")
    streamed.load_outside()
    embeddings = compress_embeddings(session, reporter)
    batches: list[Batch] = [*session.batches, (session.probe, None)] if session.needs_data else [(session.probe, None)]
    scratch = directory.work / "hidden-next" if spill else None
    if done == 0:
        states = HiddenStates(len(batches), scratch)
        streamed.prelude(batches, states)
    elif directory.record("outside") is None:
        states = HiddenStates.load(directory.hidden_path(done), len(batches), scratch)
    else:
        return
    if not session.outside_work:
        if done:  # a resumed run has no prelude behind it, which is what tells how blocks are called
            for batch in batches:
                streamed.block_kwargs(batch, done)
        streamed.release_outside()
    for index in range(done, count):
        record = _one_block(session, directory, index, states, batches, reporter)
        states.persist(directory.hidden_path(index + 1))
        directory.commit(_part(index), record)
        _remove_hidden(directory, index)
        worst = max(record["layers"], key=lambda layer: layer["error"], default=None)
        reporter.step(
            f"block {index}: " + (f"worst layer {worst['name']} error {worst['error']:.2e}" if worst else "copied")
        )
    outside = compress_outside(session, embeddings, states, batches, total, directory, reporter)
    directory.commit("outside", outside)
    reporter.step("embeddings, final norm and head")


def _part(index: int) -> str:
    return f"block-{index:05d}"


def _remove_hidden(directory: RunDirectory, index: int) -> None:
    shutil.rmtree(directory.hidden_path(index), ignore_errors=True)


def _one_block(
    session: Session,
    directory: RunDirectory,
    index: int,
    states: HiddenStates,
    batches: list[Batch],
    reporter: Reporter,
) -> dict[str, Any]:
    streamed = session.streamed
    work = session.block_work(index)
    calibrated = range(len(batches) - 1)  # the last batch is the probe
    with streamed.loaded_block(index) as block, _modules_put_back(block):
        job = BlockJob(
            prefix=streamed.block_prefix(index), block=block, work=work,
            forwards=[(_runner(streamed, index, states, number, batches[number]), batches[number][1]) for number in calibrated],
            small_forward=_small_forward(streamed, index, states, batches) if session.needs_data else None,
            dtype=streamed.dtype, true_sequential=session.recipe.true_sequential, on_nonfinite=session.recipe.on_nonfinite,
        )  # fmt: skip
        result: BlockResult = compress_block(job, reporter)
        with torch.inference_mode():
            for number, batch in enumerate(batches):
                states.put(number, streamed.advance(index, states.get(number), batch))
        prefix = streamed.block_prefix(index)
        changed = {
            prefix + n: p.data
            for n, p in block.named_parameters()
            if n.rpartition(".")[0] in result.scaled and (prefix + n).removesuffix(".weight") not in result.layers
        }
        return write_part(
            directory.path, shard_name(index + 1, len(streamed.blocks) + 1), session.checkpoint, streamed.block_names(index),
            changed, result.layers, result.skipped,
        )  # fmt: skip


@contextmanager
def _modules_put_back(block: nn.Module) -> Iterator[None]:
    """Layers that were replaced to simulate quantized inputs give way to the originals again: the block runs as the source later."""
    original = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
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


def _small_forward(
    streamed: StreamedModel, index: int, states: HiddenStates, batches: list[Batch]
) -> Callable[[torch.dtype], torch.Tensor]:
    """Runs the block over the first row of the first batch in a given dtype (folding is tried in float32)."""

    ids, mask = batches[0]
    batch = (ids[:1], mask[:1] if mask is not None else None)
    streamed.block_kwargs(
        batch, index
    )  # now, since finding them may run the block, which somebody may be watching later

    def run(dtype: torch.dtype) -> torch.Tensor:
        return streamed.run_block(index, states.get(0)[:1], batch, dtype)

    return run
