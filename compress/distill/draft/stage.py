"""Stage `draft`: a model or head that proposes what the finished artifact writes, made last and written into the artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compress.core.run_directory import DRAFT
from compress.distill.draft.report import draft_section
from compress.model.stage import Job, StageRoom
from compress.recipe.stages import Phase, Stage
from runtime.errors import RequestError

if TYPE_CHECKING:
    from compress.distill.draft.job import DraftJob
    from compress.model.context import Context


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

    def check(self, context: Context, stage: Stage) -> DraftJob:
        """See `compress.distill.draft.job.prepare`."""
        from compress.distill.draft.job import prepare

        recipe = context.recipe
        compressed = any(other.phase == "layers" for other in recipe.stages)
        return prepare(recipe, stage, context.checkpoint, context.streamed.model, context.tokenizer, compressed)

    def report(self, manifest: Mapping[str, Any]) -> str:
        """Acceptance, cost and training of the draft."""
        return draft_section(manifest)

    def forget(self, output: Path) -> None:
        """Remove a draft that the recipe no longer asks for."""
        shutil.rmtree(output / DRAFT, ignore_errors=True)

    def check_finished(self, job: Job | None, manifest: Mapping[str, Any], path: Path) -> None:
        """RequestError where a finished artifact's draft is not the one that the recipe asks for."""
        wanted = None if job is None else cast("DraftJob", job).identity
        if wanted == (manifest.get("draft") or {}).get("identity"):
            return
        if wanted is None:
            raise RequestError(f"output {path} is a finished artifact with a draft, which this recipe does not ask for")
        what = "another draft" if manifest.get("draft") else "no draft"
        todo = f"`compress draft {path} RECIPE` makes the one of this recipe without compressing again"
        raise RequestError(f"output {path} is a finished artifact with {what}; {todo}")


STAGE = Draft()
