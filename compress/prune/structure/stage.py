"""Stage `structure`: whole channels, heads, layers, experts, dimensions or tokens are removed, and the shapes shrink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compress.model.stage import StageRoom
from compress.prune.structure.report import structure_section, units_after
from compress.recipe.stages import Stage

if TYPE_CHECKING:
    from compress.model.context import Context
    from compress.prune.structure.job import StructureJob


class Structure(StageRoom):
    """The stage `structure`."""

    name = "structure"
    summary = "remove channels, heads, layers, experts: the shapes shrink"

    @property
    def record_key(self) -> str:
        """The key of the removed axis."""
        return "remove"

    def methods(self) -> Mapping[str, Any]:
        """See `compress.prune.structure`."""
        from compress.prune.structure import METHODS

        return METHODS

    def changes(self, stage: Stage) -> bool:
        """Removing tokens changes nothing for those that stay."""
        return bool(stage.config.remove != "vocabulary")

    def check(self, context: Context, stage: Stage) -> StructureJob:
        """See `compress.prune.structure.job.prepare`."""
        from compress.prune.structure.job import prepare

        return prepare(context, stage)

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

    def report(self, manifest: Mapping[str, Any]) -> str:
        """Units, error and ranking of each pass."""
        return structure_section(manifest)


STAGE = Structure()
