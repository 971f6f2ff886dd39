"""Job of a draft stage: checked against its model before anything is computed, then trained into the artifact."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress import data as calibration
from compress.core.progress import Reporter
from compress.core.run_directory import DRAFT
from compress.model.stage import Job, Store
from compress.recipe import Recipe, Stage, locate_checkpoint
from runtime.api.load import end_of_sequence
from runtime.api.model import Model
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.drafting.drafters.draft_model import check_target
from runtime.engines.choose import choose_engine
from runtime.engines.torch.engine import Blueprint
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import build_skeleton, model_kind, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.distill.draft import DraftMethod
    from compress.model.context import Context


@dataclass(frozen=True)
class DraftJob(Job):
    """A draft that can be trained, as far as can be known.

    Attributes:
        data: the stage's rows of calibration text.
        start: directory of the checkpoint that the draft begins as; None: it is cut out of the artifact.
        shortages: sentences for the user on rows that are missing.
    """

    data: calibration.CalibrationData
    start: Path | None
    shortages: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """Of `compress.distill.draft.DraftConfig`, as a rule."""
        return self.stage.config

    @property
    def method(self) -> DraftMethod:
        """See `compress.distill.draft.METHODS`."""
        from compress.distill.draft import METHODS

        return METHODS[self.stage.method]

    @property
    def rows(self) -> torch.Tensor:
        """int64 `[n, s]`."""
        return torch.cat([ids for ids, _ in self.data.batches])

    @property
    def identity(self) -> dict[str, str]:
        """What decides, with the artifact, which draft comes out."""
        text = json.dumps(self.stage.resolved(), sort_keys=True)
        found = {"draft": hashlib.sha256(text.encode()).hexdigest(), "text": self.data.sha256}
        return found if self.start is None else {**found, "model": Checkpoint(self.start).fingerprint()}

    def facts(self) -> dict[str, Any]:
        """For the manifest: of what recipe and text the draft is."""
        text = {"description": self.data.description, "sha256": self.data.sha256}
        return {"identity": self.identity, "stage": self.stage.resolved()[self.stage.kind], "text": text}

    def describe(self) -> str:
        """The method, and the steps or trials that it takes."""
        amounts = {"steps": "steps of training", "trials": "trials"}
        told = [f"{getattr(self.config, key):,} {what}" for key, what in amounts.items() if hasattr(self.config, key)]
        return ", ".join([self.stage.method, *told])

    def warnings(self, context: Context | None = None, size: int = 0) -> list[str]:
        """Fewer rows than asked for."""
        return list(self.shortages)

    def plan(self, context: Context) -> dict[str, Any]:
        """What the draft takes, in words."""
        return {"draft": self.describe()}

    def is_current(self, record: Mapping[str, Any], store: Store) -> bool:
        """Whether the recorded draft is of this stage and text, and still there."""
        return record.get("identity") == self.identity and is_there(record, store.output / DRAFT)

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Train the draft, in the directory `draft` of the artifact; see `train_draft`."""
        own = replace(store, output=store.output / DRAFT)
        shutil.rmtree(own.output, ignore_errors=True)
        try:
            return train_draft(self, store.output, own, context.streamed.device, context.tokenizer, reporter)
        except CompressError as error:
            raise CompressError(
                f"the draft: {error}; the model is compressed and kept: change the recipe's draft section and go on with --resume"
            ) from error

    def holds(self, store: Store) -> list[Path]:
        """The draft's directory, where it has one."""
        output = store.output / DRAFT
        return [output] if output.is_dir() else []


def is_there(draft: Mapping[str, Any], output: Path) -> bool:
    """Whether a draft of a record still has its directory, if it has one."""
    return "model" not in draft["drafter"] or output.is_dir()


def prepare(
    recipe: Recipe, stage: Stage, checkpoint: Checkpoint, model: PreTrainedModel, tokenizer: Any, compressed: bool
) -> DraftJob:
    """A draft stage, checked.

    Args:
        checkpoint: the target's, or that of the model it will be compressed from.
        model: its skeleton. tokenizer: its own.
        compressed: whether any of the target's layers is.

    Raises:
        RequestError: with file and line, where the draft cannot be made.
    """
    from compress.distill.draft import METHODS
    from compress.distill.draft.checks import Prospect, RefusedError

    origin, path = recipe.origin, stage.path
    kind = model_kind(model.config)
    if kind != "decoder":
        raise RequestError(origin.at(path, f"drafts are for causal language models, and this is an {kind}"))
    start = _start(recipe, stage, checkpoint)
    with _at(recipe, (*path, "model")):
        own = None if start is None else build_skeleton(read_config(start), torch.float32)
    prospect = Prospect(model, end_of_sequence(Artifact(checkpoint.path), tokenizer), compressed, own)
    try:
        METHODS[stage.method].check(stage.config, prospect)
    except RefusedError as error:
        raise RequestError(origin.at((*path, error.key), str(error))) from None
    data, warnings = calibration.load_training(recipe, stage, tokenizer, prospect.vocabulary)
    return DraftJob(stage, data, start, tuple(warnings))


def _start(recipe: Recipe, stage: Stage, checkpoint: Checkpoint) -> Path | None:
    """The checkpoint that the draft begins as, whose tokens must mean what the target's do."""
    name = getattr(stage.config, "model", None)
    if name is None:
        return None
    key = (*stage.path, "model")
    start = locate_checkpoint(name, recipe.origin, key)
    with _at(recipe, key):
        check_target({}, Artifact(start), Artifact(checkpoint.path))
    return start


@contextmanager
def _at(recipe: Recipe, key: tuple[str | int, ...]) -> Iterator[None]:
    """Errors of a drafter's directory as errors of the key that names it."""
    try:
        yield
    except RequestError as error:
        raise RequestError(recipe.origin.at(key, str(error).removeprefix("drafter: "))) from None


def train_draft(
    job: DraftJob, path: Path, store: Store, device: torch.device, tokenizer: Any, reporter: Reporter
) -> dict[str, Any]:
    """Train a draft.

    Args:
        path: the artifact, with or without its manifest.
        store: its `output` is the draft's directory, inside the artifact. In all processes but the main one this ends in `PartDone`.

    Returns:
        "method", "drafter" (what `runtime.load` takes, paths relative to the artifact), "facts", and what `DraftJob.facts` has.
    """
    from compress.data.samples import sample_rows
    from compress.distill.draft.training import DraftTraining
    from compress.distill.train.teacher import Teacher

    artifact = Artifact(path)
    # This is what `runtime.load` does after it has looked at the manifest, which is not there yet in a run.
    blueprint = Blueprint(artifact, device, "auto", None, False)
    model = Model(
        choose_engine(blueprint.build(), blueprint), tokenizer, artifact, end_of_sequence(artifact, tokenizer)
    )
    training = DraftTraining(
        artifact=path,
        fingerprint=artifact.checkpoint.fingerprint(),
        teacher=Teacher.of(model),
        rows=job.rows,
        kinds=sample_rows(tokenizer, job.config.sequence_length),
        work=store.work,
        output=store.output,
        reporter=reporter,
        apply=store.apply,
        start=job.start,
        team=store.team,
    )
    drafter = job.method.make(training, job.config)
    return {"method": job.stage.method, "drafter": drafter, "facts": training.facts, **job.facts()}
