"""The draft stage of a run: a draft of the finished weights, made when everything else is measured, written into the artifact."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.pipeline.directory import DRAFT, RunDirectory
from compress.pipeline.draft_job import DraftJob, prepare
from compress.pipeline.progress import Reporter
from runtime.artifact import Artifact
from runtime.engines.choose import lean
from runtime.engines.torch import Blueprint
from runtime.errors import CompressError, RequestError
from runtime.loading import end_of_sequence
from runtime.model import Model

if TYPE_CHECKING:
    from compress.distill.team import Team
    from compress.pipeline.session import Session

PART = "draft"


def check_draft(session: Session) -> DraftJob | None:
    """The recipe's draft, if it has one; `RequestError`, with file and line, where it cannot be made for the model."""
    if session.recipe.draft_stage is None:
        return None
    return prepare(
        session.recipe, session.checkpoint, session.streamed.model, session.tokenizer, compressed=bool(session.work)
    )


def make_draft(session: Session, directory: RunDirectory, reporter: Reporter) -> dict[str, Any] | None:
    """The recipe's draft, in the directory `draft` of the artifact; None without a draft stage.

    What is not of the recipe as it is now (its draft section may be another than when the run began) is made anew; the model is not.

    Returns:
        For the manifest, as `train_draft`. Recorded when it is done; training that was interrupted goes on.
    """
    job, output = session.draft, directory.path / DRAFT
    found = directory.record(PART)
    if (
        job is not None
        and found is not None
        and found.get("identity") == job.identity
        and output_is_there(found, output)
        and directory.whole(PART)
    ):
        return found
    directory.forget(PART)
    shutil.rmtree(output, ignore_errors=True)
    if job is None:
        return None
    try:
        made = train_draft(
            job, directory.path, output, directory.work / "draft", session.streamed.device, session.tokenizer, reporter
        )
    except CompressError as error:
        raise CompressError(
            f"the draft: {error}; the model is compressed and kept: change the recipe's draft section and go on with --resume"
        ) from error
    directory.commit(PART, made, holds=[output] if output.is_dir() else [])
    return made


def check_same_draft(session: Session, manifest: dict[str, Any], path: Path) -> None:
    """RequestError where a finished artifact's draft is not the one that the recipe asks for."""
    wanted = None if session.draft is None else session.draft.identity
    if wanted == (manifest.get("draft") or {}).get("identity"):
        return
    if wanted is None:
        raise RequestError(f"output {path} is a finished artifact with a draft, which this recipe does not ask for")
    what = "another draft" if manifest.get("draft") else "no draft"
    todo = f"`compress draft {path} RECIPE` makes the one of this recipe without compressing again"
    raise RequestError(f"output {path} is a finished artifact with {what}; {todo}")


def output_is_there(made: dict[str, Any], output: Path) -> bool:
    """Whether a draft that was made still has its directory, if it has one."""
    return "model" not in made["drafter"] or output.is_dir()


def train_draft(
    job: DraftJob,
    path: Path,
    output: Path,
    work: Path,
    device: torch.device,
    tokenizer: Any,
    reporter: Reporter,
    team: Team | None = None,
) -> dict[str, Any]:
    """Make a draft.

    Args:
        path: the artifact, with or without its manifest.
        output: the draft's directory, inside it.
        work: for what an interrupted call goes on from.
        team: the processes that share the training; in all but the main one this ends in `PartDone`.

    Returns:
        "method", "drafter" (what `runtime.load` takes, paths relative to the artifact), "facts", and what `DraftJob.facts` has.
    """
    from compress.distill.making import Making
    from compress.distill.samples import sample_rows
    from compress.distill.teacher import Teacher
    from compress.distill.team import Team

    artifact = Artifact(path)
    # This is what `runtime.load` does after it has looked at the manifest, which is not there yet in a run.
    blueprint = Blueprint(artifact, device, "auto", None, False)
    model = Model(lean(blueprint.build(), blueprint), tokenizer, artifact, end_of_sequence(artifact, tokenizer))
    making = Making(
        artifact=path,
        fingerprint=artifact.checkpoint.fingerprint(),
        teacher=Teacher.of(model),
        rows=job.rows,
        kinds=sample_rows(tokenizer, job.config.sequence_length),
        work=work,
        output=output,
        reporter=reporter,
        start=job.start,
        team=team or Team(),
    )
    drafter = job.method.make(making, job.config)
    return {"method": job.stage.method, "drafter": drafter, "facts": making.facts, **job.facts()}
