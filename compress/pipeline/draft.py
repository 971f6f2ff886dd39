"""The draft stage of a run: a draft of the finished weights, made when everything else is measured, written into the artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress import calibration
from compress.pipeline.directory import DRAFT, RunDirectory
from compress.pipeline.progress import Reporter
from runtime.artifact import Artifact
from runtime.engines.choose import lean
from runtime.engines.torch import Blueprint
from runtime.errors import RequestError
from runtime.loading import end_of_sequence
from runtime.model import Model

if TYPE_CHECKING:
    from compress.pipeline.session import Session

PART = "draft"


def check_draft(session: Session) -> None:
    """Raise `RequestError`, with file and line, where the recipe's draft cannot be made for the model."""
    stage = session.recipe.draft_stage
    if stage is None:
        return
    origin, path = session.recipe.origin, ("stages", stage.index, stage.kind)
    if session.streamed.kind != "decoder":
        text = f"drafts are for causal language models, and this is an {session.streamed.kind}"
        raise RequestError(origin.at(path, text))
    depth, config = len(session.streamed.blocks), session.streamed.config.get_text_config()
    layers = getattr(stage.config, "layers", None)
    chosen = layers if isinstance(layers, list) else [layers - 1] if isinstance(layers, int) else []
    if (isinstance(layers, int) and layers < 1) or any(not 0 <= layer < depth for layer in chosen):
        text = f"the model has {depth} layers; the draft cannot have {layers}"
        raise RequestError(origin.at((*path, "layers"), text))
    last = getattr(stage.config, "exit_layer", None)
    if last is not None and last >= depth:
        text = f"the model has {depth} layers; the draft must leave it before the last, not after {last}"
        raise RequestError(origin.at((*path, "exit_layer"), text))
    limit = getattr(config, "max_position_embeddings", None)
    length = getattr(stage.config, "sequence_length", None)
    if limit is not None and length is not None and length > limit:
        text = f"rows of {stage.config.sequence_length} tokens are more than the {limit} positions of the model"
        raise RequestError(origin.at((*path, "sequence_length"), text))
    if limit is not None and stage.config.tokens >= limit:
        text = f"{stage.config.tokens} drafted tokens do not fit the model's context of {limit}"
        raise RequestError(origin.at((*path, "tokens"), text))
    vocabulary = getattr(stage.config, "vocabulary", None)
    if vocabulary is not None and vocabulary > session.vocabulary:
        text = f"the model has {session.vocabulary} tokens; the draft cannot keep {vocabulary}"
        raise RequestError(origin.at((*path, "vocabulary"), text))
    if not session.recipe.calibration.packing:
        raise RequestError(
            session.recipe.calibration.at("packing", "the draft stage is trained on full rows; set packing: true")
        )


def make_draft(session: Session, directory: RunDirectory, reporter: Reporter) -> dict[str, Any] | None:
    """The recipe's draft, in the directory `draft` of the artifact; None without a draft stage.

    Returns:
        For the manifest: "method", "drafter" (what `runtime.load` takes, paths relative to the artifact), "facts". Recorded when it is
        done; training that was interrupted goes on.
    """
    stage = session.recipe.draft_stage
    if stage is None:
        return None
    found = directory.record(PART)
    if found is not None:
        return found
    from compress.distill import METHODS
    from compress.distill.making import Making
    from compress.distill.samples import sample_rows
    from compress.distill.teacher import Teacher

    config = stage.config
    artifact = Artifact(directory.path)
    # The manifest is not there yet, so this is what `runtime.load` does after it has looked for one.
    blueprint = Blueprint(artifact, session.streamed.device, "auto", None, False)
    model = Model(
        lean(blueprint.build(), blueprint), session.tokenizer, artifact, end_of_sequence(artifact, session.tokenizer)
    )
    making = Making(
        artifact=directory.path,
        fingerprint=artifact.checkpoint.fingerprint(),
        teacher=Teacher.of(model),
        rows=_rows(session),
        kinds=sample_rows(session.tokenizer, config.sequence_length),
        work=directory.work / "draft",
        output=directory.path / DRAFT,
        reporter=reporter,
    )
    drafter = METHODS[stage.method].make(making, config)
    result = {"method": stage.method, "drafter": drafter, "facts": making.facts}
    directory.commit(PART, result)
    return result


def _rows(session: Session) -> torch.Tensor:
    """Calibration text in the rows of the draft stage."""
    stage = session.recipe.draft_stage
    assert stage is not None
    config = session.recipe.calibration.model_copy(
        update={"samples": stage.config.samples, "sequence_length": stage.config.sequence_length}
    )
    data = calibration.load(config, session.tokenizer, session.vocabulary)
    rows = torch.cat([ids for ids, _ in data.batches])
    if len(rows) < 2:
        raise RequestError(
            config.at("data", "the draft stage needs at least two rows of text: one to train on, one held out")
        )
    return rows
