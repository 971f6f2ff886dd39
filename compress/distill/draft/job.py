"""Job of a draft stage: checked against its model before anything is computed, then trained into the artifact."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
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
from runtime.engines.blueprint import Blueprint
from runtime.engines.choose import choose_engine
from runtime.errors import CompressError, RequestError
from runtime.formats.quantization_config import refuse_prefix
from runtime.modeling.skeleton import build_skeleton, model_kind, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.distill.draft import DraftMethod
    from compress.model.context import Context


@dataclass(frozen=True)
class DraftRecord:
    """What a manifest says of its draft.

    Attributes:
        method: that made it.
        drafter: what `runtime.load` takes, paths relative to the artifact.
        facts: what its training has found; see `compress.distill.draft.training.DraftTraining`.
        identity: what decides, with the artifact, which draft comes out.
        stage: the fields of its stage. text: "description" and "sha256" of the text that it was trained on.
    """

    method: str
    drafter: dict[str, Any]
    facts: dict[str, Any]
    identity: dict[str, str] = field(default_factory=dict)
    stage: dict[str, Any] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> DraftRecord | None:
        """The draft of a manifest; None: it has none."""
        made = manifest.get("draft")
        return cls(**made) if made else None

    @property
    def directory(self) -> str | None:
        """Name of its directory in the artifact; None: it needs none."""
        return self.drafter.get("model")

    def is_there(self, artifact: Path) -> bool:
        """Whether the artifact still has its directory."""
        return self.directory is None or (artifact / self.directory).is_dir()


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
        made = DraftRecord(**record)
        return made.identity == self.identity and made.is_there(store.output)

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Train the draft, in the directory `draft` of the artifact; see `train_draft`."""
        own = replace(store, output=store.output / DRAFT)
        shutil.rmtree(own.output, ignore_errors=True)
        try:
            return asdict(train_draft(self, store.output, own, context.streamed.device, context.tokenizer, reporter))
        except CompressError as error:
            raise CompressError(
                f"the draft: {error}; the model is compressed and kept: change the recipe's draft section and go on with --resume"
            ) from error

    def holds(self, store: Store) -> list[Path]:
        """The draft's directory, where it has one."""
        output = store.output / DRAFT
        return [output] if output.is_dir() else []


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
    from compress.distill.draft.checks import Prospect, RefusedError, check_trained

    origin, path = recipe.origin, stage.path
    kind = model_kind(model.config)
    if kind != "decoder":
        raise RequestError(origin.at(path, f"drafts are for causal language models, and this is an {kind}"))
    text = f"no draft can be trained for {checkpoint.path}, which training would run without a prefix"
    refuse_prefix(checkpoint.config.get("quantization_config"), origin.at(path, text))
    name, start, own = getattr(stage.config, "model", None), None, None
    if name is not None:
        key = (*path, "model")
        start = locate_checkpoint(name, origin, key)
        with _at(recipe, key):
            check_target({}, Artifact(start), Artifact(checkpoint.path))
            own = build_skeleton(read_config(start), torch.float32)
    prospect = Prospect(model, end_of_sequence(Artifact(checkpoint.path), tokenizer), compressed, own)
    method = METHODS[stage.method]
    try:
        if method.trains:
            check_trained(stage.config, prospect)
        method.check(stage.config, prospect)
    except RefusedError as error:
        raise RequestError(origin.at((*path, error.key), str(error))) from None
    data, warnings = calibration.load_training(recipe, stage, tokenizer, prospect.vocabulary)
    return DraftJob(stage, data, start, tuple(warnings))


@contextmanager
def _at(recipe: Recipe, key: tuple[str | int, ...]) -> Iterator[None]:
    """Errors of a drafter's directory as errors of the key that names it."""
    try:
        yield
    except RequestError as error:
        raise RequestError(recipe.origin.at(key, str(error).removeprefix("drafter: "))) from None


def train_draft(
    job: DraftJob, path: Path, store: Store, device: torch.device, tokenizer: Any, reporter: Reporter
) -> DraftRecord:
    """Train a draft.

    Args:
        path: the artifact, with or without its manifest.
        store: its `output` is the draft's directory, inside the artifact. In all processes but the main one this ends in `PartDone`.
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
        teacher=Teacher.of(model),
        rows=job.rows,
        kinds=sample_rows(tokenizer, job.config.sequence_length),
        store=store,
        reporter=reporter,
        start=job.start,
    )
    drafter, stage = job.method.make(training, job.config), job.stage
    text = {"description": job.data.description, "sha256": job.data.sha256}
    return DraftRecord(stage.method, drafter, training.facts, job.identity, stage.resolved()[stage.kind], text)
