"""Stage `draft`: a model or head that proposes what the finished artifact writes, made last and written into the artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.run_directory import DRAFT
from compress.model.stage import Job, StageRoom, Store
from compress.recipe.stages import Phase, Stage
from runtime.errors import CompressError, RequestError

if TYPE_CHECKING:
    from compress.core.progress import Reporter
    from compress.distill.draft.job import DraftJob
    from compress.model.context import Context


@dataclass(frozen=True)
class CheckedDraft(Job):
    """A draft that has been checked."""

    draft: DraftJob

    def describe(self) -> str:
        """The method, and what making the draft takes."""
        return self.draft.effort

    def warnings(self, context: Context, size: int) -> list[str]:
        """Fewer rows than asked for."""
        return list(self.draft.warnings)

    def plan(self, context: Context) -> dict[str, Any]:
        """What making the draft takes, in words."""
        return {"draft": self.draft.effort}

    def is_current(self, record: Mapping[str, Any], store: Store) -> bool:
        """Whether the recorded draft is of this stage and text, and still there."""
        return record.get("identity") == self.draft.identity and is_there(record, store.output / DRAFT)

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Make the draft, in the directory `draft` of the artifact; see `train_draft`."""
        from compress.distill.draft.job import train_draft

        own = replace(store, output=store.output / DRAFT)
        shutil.rmtree(own.output, ignore_errors=True)
        try:
            return train_draft(self.draft, store.output, own, context.streamed.device, context.tokenizer, reporter)
        except CompressError as error:
            raise CompressError(
                f"the draft: {error}; the model is compressed and kept: change the recipe's draft section and go on with --resume"
            ) from error

    def holds(self, store: Store) -> list[Path]:
        """The draft's directory, where it has one."""
        output = store.output / DRAFT
        return [output] if output.is_dir() else []


class Draft(StageRoom):
    """The stage `draft`. It has an identity of its own: one that failed is corrected without compressing again."""

    name = "draft"
    summary = "make a small model that proposes what the artifact writes"
    phase: Phase = "artifact"
    once = "an artifact has one draft, and stage {first} says how it is made"
    own_identity = True

    def methods(self) -> Mapping[str, Any]:
        """See `compress.distill.draft`."""
        from compress.distill.draft import METHODS

        return METHODS

    def check(self, context: Context, stage: Stage) -> CheckedDraft:
        """See `compress.distill.draft.job.prepare`."""
        from compress.distill.draft.job import prepare

        recipe = context.recipe
        compressed = any(other.phase == "layers" for other in recipe.stages)
        draft = prepare(recipe, stage, context.checkpoint, context.streamed.model, context.tokenizer, compressed)
        return CheckedDraft(stage, draft)

    def forget(self, output: Path) -> None:
        """Remove a draft that the recipe no longer asks for."""
        shutil.rmtree(output / DRAFT, ignore_errors=True)

    def check_finished(self, job: Job | None, manifest: Mapping[str, Any], path: Path) -> None:
        """RequestError where a finished artifact's draft is not the one that the recipe asks for."""
        wanted = job.draft.identity if isinstance(job, CheckedDraft) else None
        if wanted == (manifest.get("draft") or {}).get("identity"):
            return
        if wanted is None:
            raise RequestError(f"output {path} is a finished artifact with a draft, which this recipe does not ask for")
        what = "another draft" if manifest.get("draft") else "no draft"
        todo = f"`compress draft {path} RECIPE` makes the one of this recipe without compressing again"
        raise RequestError(f"output {path} is a finished artifact with {what}; {todo}")


def is_there(made: Mapping[str, Any], output: Path) -> bool:
    """Whether a draft that was made still has its directory, if it has one."""
    return "model" not in made["drafter"] or output.is_dir()


STAGE = Draft()
