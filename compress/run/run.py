"""`apply`: one pass over the blocks of a checkpoint, each written as its own shard; then the rest, the gate, and the numbers."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from compress.core.files import disk_errors
from compress.core.memory_bounds import Bounds
from compress.core.processes import Team
from compress.core.progress import Reporter
from compress.core.run_directory import LOG, MANIFEST, RunDirectory
from compress.distill.draft.stage import check_same_draft, make_draft
from compress.kv_cache.stage import calibrated_policy
from compress.model.source_guard import check_source_files
from compress.recipe.models import Recipe
from compress.run import load_back
from compress.run import manifest as finish
from compress.run.cache_evaluation import evaluate_cache, too_large
from compress.run.helper_process import asking, assist, compress_blocks
from compress.run.pass_records import part_name
from compress.run.passes import Passes
from compress.run.plan import plan_session
from compress.run.result import AppliedArtifact, LimitError
from compress.run.session import choose_device
from compress.weights.allocate import allocate_sparsity
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import read_json
from runtime.errors import ResourceError
from runtime.system.memory import keep_nothing_freed, peak_bytes
from runtime.system.sizes import size


def apply(
    recipe: Recipe,
    *,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    max_memory: int | None = None,
) -> AppliedArtifact:
    """Run a recipe. Of several processes that a launcher has started the main one runs it, and all share what takes longest: statistics of
    calibration data, the layers of a block, and the training of recoveries.

    Args:
        output: directory to write; default the recipe's.
        resume: continue an unfinished run in `output`; the result has the same bytes as an uninterrupted one.
        overwrite: replace a finished artifact or an unfinished run of this tool in `output`.
        device: where blocks run: auto, cpu, cuda, cuda:1.
        max_memory: bytes that the process may take, all in all; None: what is free. Of several processes each may take so much.

    Raises:
        RequestError: the request cannot be carried out (nothing was changed). CompressError: it failed on the way; what was
            finished stays, and --resume goes on from there. A limit of `evaluate` that is exceeded is a CompressError too,
            raised after the artifact is complete.
    """
    if max_memory is not None:
        keep_nothing_freed()
    with Team.join(device) as team:
        torch.manual_seed(recipe.seed)
        if not team.is_main:
            with disk_errors(f"writing to {output or recipe.output_directory}"):
                path = assist(recipe, device, team)
            manifest = read_json(path / MANIFEST)
            return AppliedArtifact(path, manifest["metrics"], manifest, peak_memory=peak_bytes())
        with asking(team, Path(output) if output is not None else recipe.output_directory), team.working():
            return _apply(recipe, output, resume, overwrite, device, quiet, max_memory, team)


def _apply(
    recipe: Recipe,
    output: Path | None,
    resume: bool,
    overwrite: bool,
    device: str,
    quiet: bool,
    max_memory: int | None,
    team: Team,
) -> AppliedArtifact:
    directory_path = Path(output) if output is not None else recipe.output_directory
    clock = _Clock()
    if not resume:
        RunDirectory(
            directory_path, {}, resume, overwrite
        )  # what is there decides alone: refused before a model is read
    passes = Passes.open(recipe, str(team.device(choose_device(device))))
    passes.team = team
    session = passes.session
    evaluation = finish.evaluation_windows(session)
    begun = RunDirectory.begun(directory_path) if resume else None
    if begun is None:
        plan = plan_session(session, evaluation, directory_path, max_memory)
    else:
        session.bind(Bounds(rows=begun.get("batch_rows")))
    identity = session.identity(evaluation)
    directory = RunDirectory(directory_path, identity, resume, overwrite)
    if directory.finished:
        manifest = finish.read_manifest(directory)
        check_same_draft(session, manifest, directory.path)
        Artifact(directory.path).verify()
        directory.settle()
        return _accept(AppliedArtifact(directory.path, manifest["metrics"], manifest, clock.seconds, peak_bytes()))
    if begun is not None:
        plan = plan_session(session, evaluation, directory.path, max_memory, session.bounds)
    if plan.problems:
        raise ResourceError("; ".join(plan.problems))
    clock.lap("prepare")

    with (
        directory.claimed(),
        disk_errors(f"writing to {directory.path}"),
        Reporter(directory.path / LOG, quiet) as reporter,
    ):
        directory.warn = reporter.warn
        check_source_files(directory.work, session.original)
        reporter.info(plan.headline())
        for warning in [
            *plan.warnings,
            too_large(session, plan.bytes_after),
            *([session.calibration.warning] if session.reads_text else []),
        ]:
            if warning:
                reporter.warn(warning)
        if passes.jobs:
            kinds = {part_name(number): job.stage.kind for number, job in enumerate(passes.jobs)}
            directory.committed = lambda part: clock.lap(kinds[part]) if part in kinds else None
            session = passes.run(directory, plan.spill, reporter)
            clock.lap(passes.jobs[-1].stage.kind)
        allocate_sparsity(session, directory, reporter, plan.spill)
        highest = compress_blocks(session, directory, reporter, plan.spill, team)
        clock.lap("compress")
        finish.write_metadata(session, directory)
        artifact = load_back.open_artifact(directory.path, session)
        load_back.check_against_pipeline(session, artifact, directory, reporter)
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
        highest = max(highest, peak_bytes())
        if max_memory is not None and highest > max_memory:
            one = "the run" if team.size == 1 else "one of the processes"
            reporter.warn(f"{one} took {size(highest)} of memory, more than the {size(max_memory)} of max_memory")
        result = AppliedArtifact(directory.path, metrics, manifest, clock.seconds, highest, reporter.warnings)
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


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """The time since the last one belongs to this phase, which may have had some before."""
        now = time.monotonic()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self._last, 3)
        self._last = now
