"""Stage `structure`: whole channels, heads, layers, experts, dimensions or tokens are removed, and the shapes shrink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.model.stage import Job, StageRoom, Store
from compress.recipe.stages import Stage

if TYPE_CHECKING:
    import torch

    from compress.core.memory_bounds import Bounds
    from compress.core.progress import Reporter
    from compress.model.context import Context
    from compress.model.footprint import Footprint, Rows, Speed
    from compress.prune.structure.cut_plan import CutPlan
    from runtime.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class CheckedStructure(Job):
    """A removal that has been checked."""

    removal: CutPlan

    @property
    def needs(self) -> set[str]:
        """What is collected to rank units, and to fit what stays."""
        return self.removal.needs

    @property
    def kept_tokens(self) -> torch.Tensor | None:
        """Tokens that stay, where tokens go."""
        return None if self.removal.tokens is None else self.removal.tokens.kept

    @property
    def stored(self) -> int:
        """Bytes of the whole model on the disk."""
        return self.removal.whole.stored

    def outline(self, context: Context, directory: Path) -> Checkpoint:
        """The smaller model, of zeros, with a tokenizer that goes with it."""
        from compress.prune.structure.job import outline

        return outline(directory, context.streamed, self.removal)

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """See `compress.prune.structure.job_footprint`."""
        from compress.prune.structure.job_footprint import structure_footprint

        length = context.recipe.calibration.sequence_length
        return structure_footprint(self.removal, rows, length, speed, context.streamed.device)

    def describe(self) -> str:
        """ "ffn 1024 -> 768 channels by obs, readers refitted"."""
        return self.removal.describe()

    def warnings(self, context: Context, size: int) -> list[str]:
        """Too little text for second moments; layers that cannot be cut."""
        from compress.prune.structure.job_footprint import few_tokens

        text = few_tokens(self.removal, context.calibration.tokens) if self.needs else ""
        found = [context.recipe.calibration.at("samples", text)] if text else []
        names = context.reference.predicting
        if names and self.removal.settings.remove != "layers":
            found.append(
                f"{names[0]} and what else belongs to layers for multi-token prediction ({len(names)} tensors) is left out: it has the "
                "shapes of the model that is cut"
            )
        return found

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Write the smaller checkpoint; see `remove_structure`."""
        from compress.prune.structure.driver import remove_structure
        from compress.prune.structure.removal import Pass

        probe = (context.probe, None)
        batches = context.batches if self.needs else [probe]
        return remove_structure(
            Pass(self.removal, context.streamed, batches, probe, store.output, store.work, store.spill, reporter)
        )


class Structure(StageRoom):
    """The stage `structure`."""

    name = "structure"
    summary = "remove channels, heads, layers, experts: the shapes shrink"

    @property
    def record_key(self) -> str:
        """What is removed."""
        return "remove"

    def methods(self) -> Mapping[str, Any]:
        """See `compress.prune.structure`."""
        from compress.prune.structure import METHODS

        return METHODS

    def changes(self, stage: Stage) -> bool:
        """A model with fewer tokens says of those what it said before."""
        return bool(stage.config.remove != "vocabulary")

    def check(self, context: Context, stage: Stage) -> CheckedStructure:
        """See `compress.prune.structure.job.prepare`."""
        from compress.prune.structure.job import prepare

        return CheckedStructure(stage, prepare(context, stage))

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """Units and parameters, before and after."""
        before, after = record["parameters_before"], record["parameters_after"]
        change = f"{before:,} -> {after:,} ({after / max(before, 1) - 1:+.1%})"
        return (
            f"{record['unit']} by {record['method']}",
            f"{record['before']:,}",
            units_after(record),
            f"parameters {change}",
        )


def units_after(record: Mapping[str, Any]) -> str:
    """How many units a layer has now: "768", or "480 to 736" where layers differ."""
    widths = record.get("widths") or [record["after"]]
    return f"{min(widths):,}" if min(widths) == max(widths) else f"{min(widths):,} to {max(widths):,}"


STAGE = Structure()
