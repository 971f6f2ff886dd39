"""Session of a run: every stage of a recipe checked against the model that it will find, before anything is computed.

Stages of phase "model" make a new checkpoint each. As long as they have not run, checkpoints of zeros stand in for
the ones they make, so that what comes after is checked against the shapes that it will find.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from compress.core.version import VERSION
from compress.model.check_model import check_streams
from compress.model.context import Context
from compress.model.dry_run import check_runs
from compress.model.float8_source import open_checkpoint
from compress.model.stage import WRITE, Job, LayersJob, StageRoom
from compress.recipe import KINDS, Recipe, Stage, locate_model
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError


@dataclass(frozen=True)
class ModelState:
    """A model on its way through the stages of phase "model".

    Attributes:
        checkpoint: as it is now. original: as the recipe names it.
        settled, kept_tokens, records: see `Context`.
    """

    checkpoint: Checkpoint
    original: Checkpoint
    settled: int = -1
    kept_tokens: tuple[torch.Tensor, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()

    def context(self, recipe: Recipe, device: str, experts_apart: bool = False) -> Context:
        """For a stage that works on it."""
        return Context.open(
            recipe, self.checkpoint, device, self.original, experts_apart,
            settled=self.settled, kept_tokens=self.kept_tokens, records=self.records,
        )  # fmt: skip

    def layers(self, recipe: Recipe, device: str) -> LayersJob:
        """All stages of `recipe` that compress layers."""
        context = self.context(recipe, device, experts_apart=True)
        room = next(kind for kind in KINDS.values() if kind.phase == "layers")
        job: LayersJob = room.check(context, Stage(WRITE, "", None, len(recipe.stages)))
        context.reads_text = bool(job.needs)
        return job

    def after(self, job: Job, checkpoint: Checkpoint, record: Mapping[str, Any] | None = None) -> ModelState:
        """What a job makes of it."""
        return replace(
            self,
            checkpoint=checkpoint,
            settled=job.stage.index if kind_of(job.stage).settles_layers else self.settled,
            kept_tokens=self.kept_tokens if job.kept_tokens is None else (*self.kept_tokens, job.kept_tokens),
            records=self.records if record is None else (*self.records, record),
        )


@dataclass(frozen=True)
class Session:
    """A recipe that can be carried out, as far as that is known before.

    Attributes:
        before: jobs of phase "model", in order.
        layers: the stages that compress layers of the last model.
        after: jobs of phase "artifact", in order.
    """

    recipe: Recipe
    device: str
    before: tuple[Job, ...]
    layers: LayersJob
    after: tuple[Job, ...]
    _placeholders: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, recipe: Recipe, device: str = "auto") -> Session:
        """Check everything that can be checked without computing.

        Raises:
            RequestError: what the recipe asks for cannot be done.
        """
        stages = _model_stages(recipe)
        original = open_checkpoint(locate_model(recipe))
        room = tempfile.TemporaryDirectory(prefix="compress-plan-") if stages else None
        state = ModelState(original, original)
        jobs: list[Job] = []
        for stage in stages:
            assert room is not None
            context = state.context(recipe, device)
            if not jobs:
                check_runs(context.streamed)
            before = layers_before(recipe, stage)
            if before is not None:
                state.layers(before, device).check_settled(stage)
            job = kind_of(stage).check(context, stage)
            state = state.after(job, job.outline(context, Path(room.name) / str(len(jobs))))
            jobs.append(job)
        return cls._settled(recipe, device, tuple(jobs), state, room)

    def reopened(self, state: ModelState) -> Session:
        """The session of the model that `before` has made, with the same bounds."""
        found = Session._settled(self.recipe, self.device, self.before, state)
        found.context.bind(self.context.bounds)
        return found

    @classmethod
    def _settled(
        cls, recipe: Recipe, device: str, before: tuple[Job, ...], state: ModelState, room: Any = None
    ) -> Session:
        layers = state.layers(recipe, device)
        context = layers.context
        last = [stage for stage in recipe.stages if stage.phase == "artifact"]
        last.sort(
            key=lambda stage: kind_of(stage).own_identity
        )  # those that may be done again change nothing of the others
        after = tuple(kind_of(stage).check(context, stage) for stage in last)
        if layers.static_inputs and any(job.begins_texts for job in after):
            layers.check_prefix()
            for job in after:
                job.check_behind_prefix(context)
        context.reads_text = any(job.needs for job in (*before, layers, *after))
        if context.reads_text or recipe.evaluate is not None:
            check_streams(context.streamed)
        return cls(recipe, device, before, layers, after, room)

    @property
    def context(self) -> Context:
        """Of the model whose layers are compressed; of zeros, as long as `before` has not run."""
        return self.layers.context


def identity(context: Context) -> dict[str, Any]:
    """What must be equal for a resume to give the same bytes, but for stages that have an identity of their own."""
    found: dict[str, Any] = {
        "recipe": recipe_digest(context.recipe, whole=False),
        "source_fingerprint": context.original.fingerprint(),
        "compress_version": VERSION,
        "torch_version": torch.__version__,
        "device": context.streamed.device.type,
    }
    if context.bounds.rows is not None:
        found["batch_rows"] = context.bounds.rows
    if context.evaluation is not None:
        found["evaluation_text"] = context.evaluation.sha256
    if context.reads_text:
        found["calibration_text"] = context.calibration.sha256
    return found


def recipe_digest(recipe: Recipe, whole: bool = True) -> str:
    """SHA-256 (hex) of the recipe with every default filled in; `whole`: with stages that have an identity of their own."""
    data = recipe.resolved()
    stages = zip(recipe.stages, data["stages"], strict=True)
    data["stages"] = [told for stage, told in stages if whole or not kind_of(stage).own_identity]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def layers_before(recipe: Recipe, stage: Stage) -> Recipe | None:
    """The recipe with the stages alone that compress layers before `stage`, which must find them so; None: there are none."""
    if not kind_of(stage).settles_layers:
        return None
    stages = [other for other in recipe.stages if other.phase == "layers" and other.index < stage.index]
    return recipe.model_copy(update={"stages": stages, "evaluate": None}) if stages else None


def _model_stages(recipe: Recipe) -> list[Stage]:
    """The stages that make another model; RequestError where one comes after layers were compressed that it does not leave so."""
    layered = next((stage for stage in recipe.stages if stage.phase == "layers"), None)
    found = [stage for stage in recipe.stages if stage.phase == "model"]
    for stage in found:
        if layered is not None and layered.index < stage.index and not kind_of(stage).settles_layers:
            text = f"stage {layered.index} ({layered.kind}) compresses layers that this one would change; put this one before it"
            raise RequestError(recipe.origin.at(stage.path, text))
    return found


def kind_of(stage: Stage) -> StageRoom:
    """The room of a stage."""
    return KINDS[stage.kind]
