"""Stages that make another model before the layers of it are compressed: each is a pass of its own, from checkpoint to checkpoint.

Before anything is computed, all of them are gone through with checkpoints of zeros, so that what comes after is checked against the shapes
that it will find. Then each pass writes its checkpoint into the run's work directory, and the last one is what is compressed.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.core.processes import Team
from compress.core.progress import Reporter
from compress.core.run_directory import WORK, RunDirectory, remove
from compress.distill.recover import job as recover_job
from compress.distill.recover.job import RecoverJob
from compress.distill.recover.stage import Recovery, recover
from compress.model.dry_run import check_runs
from compress.model.float8_source import open_checkpoint
from compress.model.streamed import StreamedModel
from compress.prune.structure import job as structure_job
from compress.prune.structure.job import StructureJob, outline
from compress.prune.structure.removal import Pass
from compress.prune.structure.stage import remove_structure
from compress.recipe import Recipe, Stage, locate_model
from compress.run import manifest
from compress.run.helper_process import ask, compress_blocks
from compress.run.pass_records import facts, part_name
from compress.run.session import Session, choose_device
from compress.weights.allocate import allocate_sparsity
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError

WHOLE = ("structure", "recover")
"""Kinds of stages that make another model."""
_LAYERED = ("prune", "quantize")
Job = StructureJob | RecoverJob


@dataclass
class Passes:
    """The passes of a recipe.

    Attributes:
        session: of what is compressed in the end. As long as nothing is computed, of a checkpoint of zeros where there are passes.
        jobs: the passes, in order.
        team: the processes that share what is trained; this is the main one.
    """

    recipe: Recipe
    device: str
    session: Session
    jobs: list[Job]
    team: Team = field(default_factory=Team)
    _placeholders: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, recipe: Recipe, device: str = "auto") -> Passes:
        """Check everything that can be checked without computing.

        Raises:
            RequestError: what the recipe asks for cannot be done.
        """
        stages = _whole_stages(recipe)
        if not stages:
            return cls(recipe, device, Session.open(recipe, device), [])
        original = open_checkpoint(locate_model(recipe))
        room = tempfile.TemporaryDirectory(prefix="compress-plan-")
        whole = StreamedModel(original, choose_device(device))
        check_runs(whole)
        checkpoint, jobs, settled = original, list[Job](), -1
        for number, stage in enumerate(stages):
            streamed = StreamedModel(checkpoint, choose_device(device))
            if stage.kind == "recover":
                layered = _layers_before(recipe, stage)
                if layered is not None:
                    _check_outside(Session.open(layered, device, checkpoint, original, settled), stage)
                jobs.append(recover_job.prepare(recipe, stage, Session.plain(recipe, checkpoint, device), whole))
                settled = stage.index
                continue
            job = structure_job.prepare(recipe, stage, streamed)
            jobs.append(job)
            checkpoint = outline(Path(room.name) / str(number), streamed, job)
        session = Session.open(recipe, device, checkpoint, original, settled)
        session.jobs = tuple(jobs)
        return cls(recipe, device, session, jobs, _placeholders=room)

    def run(self, directory: RunDirectory, spill: bool, reporter: Reporter) -> Session:
        """Carry out the passes that are not done; the session of what they made."""
        if not self.jobs:
            return self.session
        original = checkpoint = self.session.original
        settled = -1
        self._forget_damaged(directory)
        for number, job in enumerate(self.jobs):
            part = part_name(number)
            output = directory.work / part
            if directory.record(part) is None:
                work = output.with_name(f"{part}-work")
                if isinstance(job, RecoverJob):
                    found = self._recover(job, checkpoint, settled, directory, output, work, spill, reporter)
                else:
                    found = self._cut(job, checkpoint, output, work, spill, reporter)
                directory.commit(part, found, holds=[output])
                shutil.rmtree(work, ignore_errors=True)
            settled = job.stage.index if isinstance(job, RecoverJob) else settled
            if directory.record(part_name(number + 1)) is None:  # else it has been used, and is gone
                checkpoint = Checkpoint(output)
            if number:
                shutil.rmtree(directory.work / part_name(number - 1), ignore_errors=True)
        session = Session.open(self.recipe, self.device, checkpoint, original, settled)
        session.jobs = tuple(self.jobs)
        session.bind(self.session.bounds)
        return session

    def _forget_damaged(self, directory: RunDirectory) -> None:
        """Where the checkpoint that is to be gone on from is damaged, so that those before it (whose own are gone) begin anew."""
        parts = [part_name(number) for number in range(len(self.jobs))]
        done = next((number for number, part in enumerate(parts) if directory.record(part) is None), len(parts))
        while done and not directory.whole(parts[done - 1], directory.work / parts[done - 1]):
            done -= 1
            directory.warn(f"what {parts[done]} ({self.jobs[done].stage.kind}) has made is damaged: it is made again")
            directory.forget(parts[done])
            remove(directory.work / parts[done])

    def _plain(self, checkpoint: Checkpoint, job: Job) -> Session:
        """The model as it is before a pass, of which no layer is compressed."""
        session = Session.plain(self.recipe, checkpoint, self.device, self.session.original)
        session.jobs = tuple(own for own in self.jobs if own.stage.index < job.stage.index)
        session.bind(self.session.bounds)
        return session

    def _cut(
        self, job: StructureJob, checkpoint: Checkpoint, output: Path, work: Path, spill: bool, reporter: Reporter
    ) -> dict[str, Any]:
        before = self._plain(checkpoint, job)
        batches = before.batches if job.needs else [(before.probe, None)]
        probe = (before.probe, None)
        return remove_structure(Pass(job, before.streamed, batches, probe, output, work, spill, reporter))

    def _recover(
        self,
        job: RecoverJob,
        checkpoint: Checkpoint,
        settled: int,
        directory: RunDirectory,
        output: Path,
        work: Path,
        spill: bool,
        reporter: Reporter,
    ) -> dict[str, Any]:
        """Train the model as it is: where stages before compress its layers, they are compressed first."""
        layered, before = _layers_before(self.recipe, job.stage), checkpoint.path
        if layered is not None:
            before = work / "compressed"
            if not (before / WORK).is_dir():  # what is left of one that was being removed
                remove(before)
            session = Session.open(layered, self.device, checkpoint, self.session.original, settled)
            session.bind(self.session.bounds)
            own = RunDirectory(before, session.identity(None), resume=True)
            own.warn = reporter.warn
            own.claim()
            allocate_sparsity(session, own, reporter, spill)
            compress_blocks(session, own, reporter, spill, self.team)
            manifest.write_metadata(session, own)
        plain, done = self._plain(checkpoint, job), facts(directory, self.session)
        tokens = plain.source_ids(torch.arange(plain.vocabulary)) if plain.cut_tokens else None
        recovery = Recovery(job, before, plain, done, tokens, output, work, reporter, self.team)
        ask(recovery)
        found = recover(recovery)
        if layered is not None:  # the artifact will say how far its layers are from what was trained, which is nothing
            lines = [layer for record in manifest.records(session, own) for layer in record["layers"]]
            names = ("name", "method", "error")
            found["compressed"] = [{name: line[name] for name in names} for line in lines if line["error"] is not None]
        return found


def _whole_stages(recipe: Recipe) -> list[Stage]:
    """The stages that make another model; RequestError where one comes after the model's layers were compressed."""
    found: list[Stage] = []
    layered: Stage | None = None
    for stage in recipe.stages:
        if stage.kind in _LAYERED:
            layered = layered or stage
        elif stage.kind in WHOLE:
            if layered is not None and stage.kind == "structure":
                text = f"stage {layered.index} ({layered.kind}) compresses layers that this one would cut; put this one before it"
                raise RequestError(recipe.origin.at(("stages", stage.index, stage.kind), text))
            found.append(stage)
    return found


def _check_outside(session: Session, stage: Stage) -> None:
    """RequestError where a recovery would train what is in no layer otherwise than it will be stored."""
    modules = {name: session.streamed.model.get_submodule(name) for name in session.outside_work}
    embedding = next((name for name, module in modules.items() if isinstance(module, nn.Embedding)), None)
    text = None
    if embedding is not None:
        text = f"a stage before compresses {embedding}, an embedding, which recovery does not train; ignore it there, or compress it after"
    elif session.untie:
        text = "a stage before compresses the head, which shares its tensor with the embedding; ignore it there, or compress it after"
    if text is not None:
        raise RequestError(session.recipe.origin.at(("stages", stage.index, stage.kind), text))


def _layers_before(recipe: Recipe, stage: Stage) -> Recipe | None:
    """The recipe with the stages alone that compress layers before this one; None: there are none."""
    stages = [other for other in recipe.stages if other.kind in _LAYERED and other.index < stage.index]
    return recipe.model_copy(update={"stages": stages, "evaluate": None}) if stages else None
