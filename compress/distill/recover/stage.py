"""Stage `recover`: the model as earlier stages have left it is trained towards the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.model.stage import Job, StageRoom, Store
from compress.recipe.stages import Stage

if TYPE_CHECKING:
    from compress.core.memory_bounds import Bounds
    from compress.core.processes import Team
    from compress.core.progress import Reporter
    from compress.distill.recover.job import RecoverJob
    from compress.model.context import Context
    from compress.model.footprint import Footprint, Rows, Speed
    from compress.recipe import Recipe


@dataclass(frozen=True)
class CheckedRecovery(Job):
    """A recovery that has been checked."""

    training: RecoverJob

    @property
    def needs(self) -> set[str]:
        """It always reads text."""
        return {"text"}

    @property
    def stored(self) -> int:
        """Bytes of the model on the disk."""
        return self.training.whole.stored

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """Of the training, which has rows of text of its own."""
        from compress.distill.recover.job import recovery_footprint

        training = self.training
        return recovery_footprint(training, training.whole, training.teacher, speed, context.streamed.device)

    def describe(self) -> str:
        """ "recovery by finetune after sparsegpt, 400 steps of training"."""
        return self.training.describe()

    def warnings(self, context: Context, size: int) -> list[str]:
        """Fewer rows than asked for."""
        return list(self.training.warnings)

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Train, all processes together, and write a plain checkpoint; see `recover`."""
        import torch

        from compress.distill.recover.recovery import Recovery, recover

        before = context.path if store.compressed is None else store.compressed.path
        tokens = context.source_ids(torch.arange(context.vocabulary)) if context.kept_tokens else None
        paths = (context.path, context.original.path, before, store.output, store.work)
        store.ask(
            self.stage.kind,
            {
                "stage": self.stage.index,
                "paths": [str(path.absolute()) for path in paths],
                "passes": list(context.records),
                "tokens": tokens,
            },
        )
        found = recover(
            Recovery(
                self.training, before, context, context.records, tokens, store.output, store.work, reporter, store.team
            )
        )
        if store.compressed is not None:  # the artifact will say how far its layers are from what was trained: nothing
            names = ("name", "method", "error")
            layers = [layer for layer in store.compressed.layers if layer["error"] is not None]
            found["compressed"] = [{name: layer[name] for name in names} for layer in layers]
        return found


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
        """What it gives back is no change that another could win back."""
        return False

    def check(self, context: Context, stage: Stage) -> CheckedRecovery:
        """See `compress.distill.recover.job.prepare`."""
        from compress.distill.recover.job import prepare

        return CheckedRecovery(stage, prepare(context, stage))

    def assist(self, recipe: Recipe, task: Mapping[str, Any], device: str, team: Team) -> None:
        """The share of another process in `CheckedRecovery.run`."""
        from compress.distill.recover.recovery import assist

        assist(recipe, task, device, team)

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """Perplexity of held-out rows before and after, or the steps."""
        label = f"recovery by {record['recover']}"
        if "perplexity_before" not in record or "perplexity_after" not in record:
            return label, "", "", f"{record['steps']:,} steps"
        before, after = (f"{record[f'perplexity_{when}']:.4g}" for when in ("before", "after"))
        return f"{label}, perplexity of held-out rows", before, after, ""


STAGE = Recover()
