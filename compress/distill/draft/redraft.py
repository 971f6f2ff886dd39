"""Draft of a finished artifact, made or replaced by `compress draft`, in one process or several.

The present draft stays valid until the manifest, which is written last, names the new one; the new one is written into the other of two
directories.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.core.files import disk_errors, listed, write_sealed
from compress.core.loaded_bytes import loaded_bytes
from compress.core.processes import PartDone, Team
from compress.core.progress import Reporter
from compress.core.run_directory import CHOICE, DRAFTS, LOG, MANIFEST, WORK, RunDirectory, remove
from compress.core.tracking import Tracking, check_tracker, tracked
from compress.distill.draft.job import DraftJob, DraftRecord, prepare, train_draft
from compress.distill.draft.stage import STAGE
from compress.model.stage import Apply, Store
from compress.recipe import Recipe
from compress.report import write_card, write_report
from runtime.api.load import UNFINISHED, load_tokenizer
from runtime.checkpoint.artifact import SCHEMA_VERSION, Artifact
from runtime.engines.blueprint import Blueprint
from runtime.errors import RequestError
from runtime.system import lock
from runtime.system.device import choose_device


def redraft(
    path: Path, recipe: Recipe, apply: Apply, device: str = "auto", quiet: bool = False, report_to: str | None = None
) -> dict[str, Any] | None:
    """Make the draft that a recipe's draft stage asks for and put it into a finished artifact.

    Args:
        path: the artifact.
        recipe: only its draft stage and its calibration text count.
        apply: runs another recipe, as some methods ask for.
        device: where the artifact computes and the draft is trained; of several processes each has the launcher's.
        report_to: tracker that receives the training's numbers: wandb, mlflow, trackio.

    Returns:
        What the manifest says of the draft; None in all but the main process. A draft that is there already is not made again.

    Raises:
        RequestError: it cannot be made; nothing was changed. CompressError: it failed on the way; the artifact is as it was, and the same
            call goes on from there.
    """
    check_tracker(report_to)
    with Team.join(device) as team, _alone(path) if team.is_main else nullcontext():
        return _redraft(path, recipe, apply, device, quiet, team, report_to)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from writing to the artifact meanwhile."""
    with ExitStack() as stack:
        if path.is_dir():  # else `_finished` says what is wrong
            for other in (lock.beside(path.absolute()), lock.inside(path)):
                lock.refuse_held(other, path)
            try:
                stack.enter_context(lock.locked(lock.inside(path), path))
            except OSError as error:
                raise RequestError(f"{path} cannot be written: {error.strerror or error}") from error
        yield


def _redraft(
    path: Path, recipe: Recipe, apply: Apply, device: str, quiet: bool, team: Team, report_to: str | None
) -> dict[str, Any] | None:
    where = team.device(choose_device(device))
    with team.in_turn():
        artifact = _finished(path)
        tokenizer = load_tokenizer(artifact.path)
        job = _job(recipe, artifact, tokenizer, team)
    assert artifact.manifest is not None
    old = DraftRecord.of(artifact.manifest)
    if old is not None and old.identity == job.identity and old.is_there(artifact.path):
        return asdict(old) if team.is_main else None
    used = None if old is None else old.directory
    output = artifact.path / next(name for name in DRAFTS if name != used)
    if team.is_main:
        for leftover in [*artifact.path.glob(".draft*.tmp"), output]:
            remove(leftover)
    log = artifact.path / LOG if team.is_main else None
    with disk_errors(f"writing to {artifact.path}") if team.is_main else nullcontext():
        with Reporter(log, quiet or not team.is_main) as reporter, ExitStack() as stack:
            to = report_to if team.is_main else None
            reporter.tracking = stack.enter_context(
                tracked(Tracking(to, recipe.name, recipe.resolved(), reporter.warn))
            )
            for warning in job.warnings() if team.is_main else ():
                reporter.warn(warning)
            directory = RunDirectory(artifact.path)
            store = Store(output, directory.work / "draft", directory, apply, team=team)
            try:
                made = train_draft(job, artifact.path, store, where, tokenizer, reporter)
            except PartDone:
                return None
            reporter.tracking.log({"draft": made.facts})
        exchange_draft(artifact, made)
    return asdict(made)


def _finished(path: Path) -> Artifact:
    """A finished artifact, its files as its manifest says."""
    if not path.is_dir():
        raise RequestError(f"there is no directory {path}; give that of a finished artifact")
    artifact = Artifact(path)
    if artifact.manifest is None:
        unfinished = (artifact.path / UNFINISHED).is_file()
        text = (
            "is an unfinished run of `compress apply`; finish it with --resume"
            if unfinished
            else f"has no {MANIFEST}: drafts are made of what `compress apply` wrote (also of a recipe with a draft stage alone)"
        )
        raise RequestError(f"{artifact.path} {text}")
    artifact.verify()
    return artifact


def _job(recipe: Recipe, artifact: Artifact, tokenizer: Any, team: Team) -> DraftJob:
    stage = next((stage for stage in recipe.stages if stage.kind == STAGE.name), None)
    if stage is None:
        raise RequestError(recipe.origin.at(("stages",), "there is no draft stage, which says what draft to make"))
    blueprint = Blueprint(artifact, choose_device("cpu"), "auto", None, None)
    if tokenizer is None:
        raise RequestError(f"{artifact.path} has no tokenizer, and text needs one")
    job = prepare(recipe, stage, artifact.checkpoint, blueprint.module, tokenizer, bool(blueprint.compressed))
    if team.size > 1 and not job.method.trains:
        text = f"{stage.method} trains nothing that {team.size} processes could share; run it without the launcher"
        raise RequestError(recipe.origin.at((*stage.path, "method"), text))
    if team.size > 1 and stage.config.batch_size % team.size:
        text = f"{stage.config.batch_size} rows cannot be shared by {team.size} processes; make it a multiple"
        raise RequestError(recipe.origin.at((*stage.path, "batch_size"), text))
    return job


def exchange_draft(artifact: Artifact, made: DraftRecord) -> None:
    """Let the manifest name the new draft, then remove the old one."""
    path, manifest = artifact.path, artifact.manifest
    assert manifest is not None
    # What was found fastest was found among other drafters. Gone first: a choice that outlives its draft would be followed.
    remove(path / CHOICE)
    own = tuple(f"{name}/" for name in DRAFTS)
    kept = {name: facts for name, facts in manifest["files"].items() if name != CHOICE and not name.startswith(own)}
    place = made.directory
    files = kept | listed(path, [] if place is None else sorted((path / place).iterdir()))
    changed = {"schema_version": SCHEMA_VERSION, "draft": asdict(made), "files": dict(sorted(files.items()))}
    held = manifest["bytes"]
    changed["bytes"] = loaded_bytes(path, manifest | changed, held["before"], held["after"])
    write_sealed(path / MANIFEST, manifest | changed)
    for name in DRAFTS:
        if name != place:
            remove(path / name)
    shutil.rmtree(path / WORK, ignore_errors=True)
    write_report(path)
    write_card(path)
