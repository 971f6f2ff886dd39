"""`apply`: the stages of a recipe one after the other, the artifact that they make, its proof, and its numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from compress.core.files import disk_errors
from compress.core.imports import imports
from compress.core.memory_bounds import Bounds
from compress.core.processes import Team
from compress.core.progress import Reporter
from compress.core.run_directory import LOG, MANIFEST, WORK, RunDirectory, remove
from compress.core.tracking import Tracking, check_tracker, tracked
from compress.evaluate import texts
from compress.evaluate.limits import exceeded
from compress.evaluate.streamed import evaluate_artifact
from compress.model.stage import Compressed, Job, Readers, Store
from compress.recipe import KINDS, Recipe, load
from compress.run import load_back
from compress.run.manifest import records, write_manifest, write_metadata
from compress.run.plan import plan_session
from compress.run.record import RunRecord, sample_prompts
from compress.run.session import ModelState, Session, identity, kind_of, layers_before
from compress.run.source_files import source_files_checked
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint, read_json
from runtime.errors import CompressError, ResourceError
from runtime.system.device import choose_device
from runtime.system.memory import keep_nothing_freed, peak_bytes
from runtime.system.sizes import size


@dataclass
class AppliedArtifact:
    """What `apply` gives back.

    Attributes:
        path: directory of the artifact.
        metrics: quality, sizes and limits, as in the manifest.
        manifest: content of compress.json.
        seconds: wall-clock time of each phase of this run (a resumed run counts only what it did itself).
        peak_memory: largest resident memory of the process, in bytes; of several, of the one that took most.
        prompts: texts that samples can continue: the recipe's, else beginnings of held-out text.
        samples: what `compress.run.record.make_samples` gives; None: they were not continued.
    """

    path: Path
    metrics: dict[str, Any]
    manifest: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    warnings: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    samples: dict[str, Any] | None = None


class LimitError(CompressError):
    """The artifact is complete, but worse than the recipe's `evaluate` limits allow. `result` is what `apply` would have returned."""

    def __init__(self, message: str, result: AppliedArtifact) -> None:
        super().__init__(message)
        self.result = result


@contextmanager
def helpers(team: Team, output: Path) -> Iterator[None]:
    """The main process: when this is left, all others are told that there is nothing more, and whether `output` is complete."""
    done: dict[str, Any] = {"complete": None}
    try:
        yield
        done["complete"] = str(output.absolute())
    except LimitError:
        done["complete"] = str(output.absolute())
        raise
    finally:
        team.broadcast(done)
        team.meet()  # a process that is gone before the others have heard it would abort them


def assist(recipe: Recipe, device: str, team: Team) -> Path:
    """Any other process: take part until the main one says that there is nothing more; the artifact.

    Raises:
        CompressError: the run failed.
    """
    where = str(team.device(choose_device(device)))
    nothing: dict[str, Any] = {}
    while "complete" not in (asked := team.broadcast(nothing)):
        KINDS[asked["kind"]].assist(recipe, asked["task"], where, team)
    team.meet()
    if asked["complete"] is None:
        raise CompressError("the run failed in the main process, which says why")
    return Path(asked["complete"])


def apply(
    recipe: Recipe,
    *,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    max_memory: int | None = None,
    readers: Readers | None = None,
    report_to: str | None = None,
    command: str | None = None,
) -> AppliedArtifact:
    """Run a recipe. Of several processes that a launcher has started the main one runs it, and all share what takes longest: statistics of
    calibration data, the layers of a block, and the training of recoveries.

    Args:
        output: directory to write; default the recipe's.
        resume: continue an unfinished run in `output`; the result has the same bytes as an uninterrupted one.
        overwrite: replace a finished artifact or an unfinished run of this tool in `output`.
        device: where blocks run: auto, cpu, cuda, cuda:1.
        max_memory: bytes that the process may take, all in all; None: what is free. Of several processes each may take so much.
        readers: says who can read the artifact; None: its manifest does not say.
        report_to: tracker that receives the run's numbers: wandb, mlflow, trackio.
        command: the command line, for the run's record; None: called from Python.

    Raises:
        RequestError: the request cannot be carried out (nothing was changed). CompressError: it failed on the way; what was
            finished stays, and --resume goes on from there. A limit of `evaluate` that is exceeded is a CompressError too,
            raised after the artifact is complete.
    """
    check_tracker(report_to)
    if max_memory is not None:
        keep_nothing_freed()
    path = Path(output) if output is not None else recipe.output_directory
    with Team.join(device) as team:
        torch.manual_seed(recipe.seed)
        if not team.is_main:
            with disk_errors(f"writing to {path}"):
                path = assist(recipe, device, team)
            manifest = read_json(path / MANIFEST)
            return AppliedArtifact(path, manifest["metrics"], manifest, peak_memory=peak_bytes())
        with helpers(team, path), team.working():
            directory = RunDirectory(path, resume, overwrite)
            if not resume:  # refused before a model is read
                directory.inspect({})
            where = str(team.device(choose_device(device)))
            clock = RunRecord(where, team.size, command)
            with imports():
                session = Session.open(recipe, where)
            return _accept(_apply(session, directory, max_memory, quiet, team, clock, readers, report_to))


def apply_recipe(recipe: Mapping[str, Any], output: Path) -> None:
    """Run a recipe that is a part of another run, on the CPU."""
    apply(load(recipe), output=output, device="cpu", quiet=True)


def _apply(
    session: Session,
    directory: RunDirectory,
    max_memory: int | None,
    quiet: bool,
    team: Team,
    clock: RunRecord,
    readers: Readers | None,
    report_to: str | None,
) -> AppliedArtifact:
    context, path = session.context, directory.path
    begun = directory.begun()
    plan = None
    if begun is None:
        plan = plan_session(session, path, max_memory)
    else:
        context.bind(Bounds(rows=begun.get("batch_rows")))
    own = identity(context)
    directory.inspect(own)
    apart = [kind for kind in KINDS.values() if kind.own_identity] if directory.resume else []
    jobs = {job.stage.kind: job for job in session.after}
    if directory.finished:
        manifest = read_json(path / MANIFEST)
        for kind in apart:
            kind.check_finished(jobs.get(kind.name), manifest, path)
        Artifact(path).verify()
        directory.settle()
        return AppliedArtifact(
            path, manifest["metrics"], manifest, clock.seconds, peak_bytes(), manifest.get("warnings", [])
        )
    if plan is None:
        plan = plan_session(session, path, max_memory, context.bounds)
    if plan.problems:
        raise ResourceError("; ".join(plan.problems))
    clock.lap("prepare")
    with (
        directory.claimed(),
        disk_errors(f"writing to {path}"),
        Reporter(path / LOG, quiet) as reporter,
        ExitStack() as stack,
    ):
        directory.warn = reporter.warn
        clock.begin(path, reporter.warn)
        tracking = Tracking(report_to, context.recipe.name, context.recipe.resolved(), reporter.warn)
        reporter.tracking = stack.enter_context(tracked(tracking))
        stack.enter_context(source_files_checked(directory, context.original))
        reporter.info(plan.headline())
        doubts = texts.doubt(context)
        for warning in [*plan.warnings, context.calibration.warning if context.reads_text else None, *doubts]:
            if warning:
                reporter.warn(warning)
        for kind in apart:
            if kind.name not in jobs:
                directory.forget(kind.name)
                kind.forget(path)
        run = _Run(
            session,
            Store(path, directory.work, directory, apply_recipe, plan.spill, team),
            reporter,
            clock,
            plan.limits,
            (*texts.bundled(context), *texts.overlap(context), *doubts),
            readers,
        )
        manifest, highest = run.run(own)
        tracking.log(manifest["metrics"] | {"bytes": manifest["bytes"], "seconds": clock.seconds})
        directory.finish()
        if max_memory is not None and highest > max_memory:
            one = "the run" if team.size == 1 else "one of the processes"
            reporter.warn(f"{one} took {size(highest)} of memory, more than the {size(max_memory)} of max_memory")
        prompts = sample_prompts(run.session.context)
        return AppliedArtifact(path, manifest["metrics"], manifest, clock.seconds, highest, reporter.warnings, prompts)


@dataclass
class _Run:
    """A run in its directory.

    Attributes:
        session: as it was opened; once stages have made another model, of that one.
        store: of the whole run.
        limits: on quality. warnings: sentences on the texts, for the manifest.
    """

    session: Session
    store: Store
    reporter: Reporter
    clock: RunRecord
    limits: Mapping[str, float]
    warnings: Sequence[str]
    readers: Readers | None = None

    def run(self, own: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Run all that is not done; the manifest, and the most memory that a process has taken. `own`: identity of the run."""
        directory, reporter, clock = self.store.directory, self.reporter, self.clock
        if self.session.before:
            self._make_models()
        layers, context = self.session.layers, self.session.context
        if layers.static_inputs:
            for job in self.session.after:
                if tokens := job.text_prefix(context, self.store, reporter):
                    layers.put_prefix(tokens)
                if job.begins_texts:
                    clock.lap("outlier tokens")
        made = layers.run(context, self.store, reporter)
        clock.lap(layers.title)
        write_metadata(layers, directory)
        metrics = self._judge()
        entries: dict[str, Any] = layers.manifest(context, made)
        files: list[Path] = []
        for job in self.session.after:
            metrics = self._finish(job, metrics, entries)
            files += [file for place in job.holds(self.store) for file in sorted(place.iterdir())]
        highest = max(made["peak_memory"], peak_bytes())
        clock.write(highest)
        manifest = write_manifest(context, directory, own, metrics, entries, files, self.readers, self.warnings)
        return manifest, highest

    def _judge(self) -> dict[str, Any]:
        """Compare the artifact on the disk with what the pipeline computed, and with the source; its quality."""
        layers, context, directory = self.session.layers, self.session.context, self.store.directory
        if not context.streamed.runs:
            load_back.check_stored(directory.path, context.checkpoint)
            self.clock.lap("load back")
            return {}
        artifact = load_back.open_artifact(directory.path, context)
        load_back.check_against_pipeline(context, bool(layers.needs), artifact, directory, self.reporter)
        self.clock.lap("load back")
        spill = directory.work if self.store.spill else None
        metrics = evaluate_artifact(context, artifact, self.limits, spill, self.reporter)
        self.clock.lap("evaluate")
        return metrics

    def _make_models(self) -> None:
        """Run the jobs of phase "model" that are not done, and open the session of what they made."""
        directory, before = self.store.directory, self.session.before
        context = self.session.context
        original = context.source or context.opened  # under the names of its files: every stage's context converts them
        self._forget_damaged()
        state = ModelState(original, original)
        for number, job in enumerate(before):
            part, output = _part(number), directory.work / _part(number)
            if directory.record(part) is None:
                store = replace(self.store, output=output, work=output.with_name(f"{part}-work"))
                store = replace(store, compressed=self._compressed(job, state, store))
                context = state.context(self.session.recipe, self.session.device)
                context.reads_text = self.session.context.reads_text
                context.bind(self.session.context.bounds)
                made = job.run(context, store, self.reporter)
                if kind_of(job.stage).record_key == job.stage.kind:
                    made.setdefault(job.stage.kind, job.stage.method)
                directory.commit(part, made, job.holds(store))
                shutil.rmtree(store.work, ignore_errors=True)
                self.clock.lap(job.title)
            used = directory.record(_part(number + 1)) is not None  # and is gone
            state = state.after(job, state.checkpoint if used else Checkpoint(output), directory.record(part))
            if number:
                shutil.rmtree(directory.work / _part(number - 1), ignore_errors=True)
        self.session = self.session.reopened(state)
        self.clock.lap(before[-1].title)

    def _compressed(self, job: Job, state: ModelState, store: Store) -> Compressed | None:
        """The model with its layers as stages before a job compress them."""
        recipe = layers_before(self.session.recipe, job.stage)
        if recipe is None:
            return None
        before = store.work / "compressed"
        if not (before / WORK).is_dir():  # the remains of one whose removal was interrupted
            remove(before)
        layers = state.layers(recipe, self.session.device)
        context = layers.context
        context.bind(self.session.context.bounds)
        own = RunDirectory(before, resume=True)
        own.inspect(identity(context))
        own.warn = self.reporter.warn
        own.claim()
        made = layers.run(context, replace(store, output=before, work=own.work, directory=own), self.reporter)
        write_metadata(layers, own)
        lines = [layer for record in records(context, own) for layer in record["layers"]]
        return Compressed(before, lines, layers.manifest(context, made))

    def _forget_damaged(self) -> None:
        """Forget the passes whose checkpoint is damaged, and those before them, whose checkpoints are gone."""
        directory, before = self.store.directory, self.session.before
        parts = [_part(number) for number in range(len(before))]
        done = next((number for number, part in enumerate(parts) if directory.record(part) is None), len(parts))
        while done and not directory.whole(parts[done - 1], directory.work / parts[done - 1]):
            done -= 1
            directory.warn(f"the checkpoint of {parts[done]} ({before[done].stage.kind}) is damaged: it is made again")
            directory.forget(parts[done])
            remove(directory.work / parts[done])

    def _finish(self, job: Job, metrics: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
        """Run a job of phase "artifact", if it is not done, and add its entries of the manifest; the metrics with what it changes."""
        directory, context, part = self.store.directory, self.session.context, job.stage.kind
        store = replace(self.store, work=directory.work / part)
        record = directory.record(part) if job.computes else {}
        if record is None or (record and not (job.is_current(record, store) and directory.whole(part))):
            directory.forget(part)
            record = job.run(context, store, self.reporter)
            directory.commit(part, record, job.holds(store))
            self.clock.lap(job.title)
        if context.windows is not None:
            measured = job.evaluate(context, store, context.windows, record, metrics, self.reporter)
            if measured is not metrics:
                metrics = measured
                self.clock.lap(job.evaluation_title)
        entries |= job.manifest(context, record)
        return metrics


def _part(number: int) -> str:
    """Name of the record, and of the checkpoint, of a job of phase "model"."""
    return f"pass-{number:05d}"


def _accept(result: AppliedArtifact) -> AppliedArtifact:
    """The artifact, unless the recipe's limits refuse it."""
    failed = exceeded(result.metrics)
    if failed:
        raise LimitError(f"{'; '.join(failed)}; the artifact is complete in {result.path}", result)
    return result
