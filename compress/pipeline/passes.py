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

from compress.pipeline.directory import RunDirectory
from compress.pipeline.plain import config_dict, placeholder
from compress.pipeline.progress import Reporter
from compress.pipeline.session import Session, choose_device
from compress.pipeline.stream import StreamedModel
from compress.pipeline.structure import remove_structure
from compress.pipeline.structure_job import StructureJob, prepare
from compress.prune.structure.couplings import shapes
from compress.recipe import Recipe, Stage, locate_model
from runtime.checkpoint import Checkpoint
from runtime.errors import RequestError
from runtime.skeleton import build_skeleton

WHOLE = ("structure",)
"""Kinds of stages that make another model."""
_LAYERED = ("prune", "quantize")


@dataclass
class Passes:
    """The passes of a recipe.

    Attributes:
        session: of what is compressed in the end. As long as nothing is computed, of a checkpoint of zeros where there are passes.
        jobs: the passes, in order.
    """

    recipe: Recipe
    device: str
    session: Session
    jobs: list[StructureJob]
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
        original = Checkpoint(locate_model(recipe))
        room = tempfile.TemporaryDirectory(prefix="compress-plan-")
        checkpoint, jobs = original, []
        for number, stage in enumerate(stages):
            streamed = StreamedModel(_uncompressed(checkpoint), choose_device(device))
            job = prepare(recipe, stage, streamed)
            jobs.append(job)
            checkpoint = _empty(Path(room.name) / str(number), streamed, job)
        session = Session.open(recipe, device, checkpoint, original)
        session.jobs = tuple(jobs)
        return cls(recipe, device, session, jobs, room)

    def run(self, directory: RunDirectory, spill: bool, reporter: Reporter) -> Session:
        """Carry out the passes that are not done; the session of what they made."""
        if not self.jobs:
            return self.session
        original = self.session.original
        checkpoint = original
        for number, job in enumerate(self.jobs):
            part = _part(number)
            output = directory.work / part
            if directory.record(part) is None:
                work = output.with_name(f"{part}-work")
                before = Session.plain(self.recipe, checkpoint, self.device)
                before.jobs = tuple(self.jobs)
                batches = before.batches if job.needs else [(before.probe, None)]
                found = remove_structure(
                    job, before.streamed, batches, (before.probe, None), output, work, spill, reporter
                )
                directory.commit(part, found)
                shutil.rmtree(work, ignore_errors=True)
            checkpoint = Checkpoint(output)
            if number:
                shutil.rmtree(directory.work / _part(number - 1), ignore_errors=True)
        session = Session.open(self.recipe, self.device, checkpoint, original)
        session.jobs = tuple(self.jobs)
        return session


def facts(directory: RunDirectory, session: Session) -> list[dict[str, Any]]:
    """What the passes of a run have done, for the manifest."""
    found = (directory.record(_part(number)) for number in range(len(session.jobs)))
    return [record for record in found if record is not None]


def _part(number: int) -> str:
    return f"pass-{number:05d}"


def _whole_stages(recipe: Recipe) -> list[Stage]:
    """The stages that make another model; RequestError where one comes after the model's layers were compressed."""
    found: list[Stage] = []
    layered: Stage | None = None
    for stage in recipe.stages:
        if stage.kind in _LAYERED:
            layered = layered or stage
        elif stage.kind in WHOLE:
            if layered is not None:
                text = f"stage {layered.index} ({layered.kind}) compresses layers that this one would cut; put this one before it"
                raise RequestError(recipe.origin.at(("stages", stage.index, stage.kind), text))
            found.append(stage)
    return found


def _uncompressed(checkpoint: Checkpoint) -> Checkpoint:
    if "quantization_config" in checkpoint.config:
        method = (checkpoint.config["quantization_config"] or {}).get("quant_method", "unknown")
        raise RequestError(
            f"{checkpoint.path} is compressed already (quant_method {method}); give the original checkpoint"
        )
    return checkpoint


def _empty(directory: Path, streamed: StreamedModel, job: StructureJob) -> Checkpoint:
    """A checkpoint of zeros that looks as the pass's result will."""
    source = streamed.checkpoint
    model = build_skeleton(job.config, torch.float32, stored=source.names())
    tensors = {name: (shape, source.dtype(name)) for name, shape in shapes(model).items() if source.has(name)}
    placeholder(directory, source.path, config_dict(source, streamed.config, job.config), tensors)
    return Checkpoint(directory)
