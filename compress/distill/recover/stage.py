"""Stage `recover`: the model as earlier stages have left it is trained towards the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compress.distill.recover.report import recovery_sections
from compress.model.stage import StageRoom
from compress.recipe.stages import Stage

if TYPE_CHECKING:
    from compress.core.processes import Team
    from compress.distill.recover.job import RecoverJob
    from compress.model.context import Context
    from compress.recipe import Recipe


class Recover(StageRoom):
    """The stage `recover`."""

    name = "recover"
    summary = "train what the stages before have left, towards the model's own outputs"
    settles_layers = True

    def methods(self) -> Mapping[str, Any]:
        """See `compress.distill.recover`."""
        from compress.distill.recover import METHODS

        return METHODS

    def changes(self, stage: Stage) -> bool:
        """False: the changes of a recovery stage are not themselves recovered by a later one."""
        return False

    def check(self, context: Context, stage: Stage) -> RecoverJob:
        """See `compress.distill.recover.job.prepare`."""
        from compress.distill.recover.job import prepare

        return prepare(context, stage)

    def assist(self, recipe: Recipe, task: Mapping[str, Any], device: str, team: Team) -> None:
        """The share of another process in `RecoverJob.run`."""
        from compress.distill.recover.recovery import assist

        assist(recipe, task, device, team)

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """Perplexity of held-out rows before and after, or the steps."""
        label = f"recovery by {record['recover']}"
        if "perplexity_before" not in record or "perplexity_after" not in record:
            return label, "", "", f"{record['steps']:,} steps"
        before, after = (f"{record[f'perplexity_{when}']:.4g}" for when in ("before", "after"))
        return f"{label}, perplexity of held-out rows", before, after, ""

    def report(self, manifest: Mapping[str, Any]) -> str:
        """Losses, perplexity and what was won back."""
        return recovery_sections(manifest)


STAGE = Recover()
