"""Stage `rotate`: orthogonal matrices folded into the weights, which leave the function as it is and spread outliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compress.model.stage import StageRoom
from compress.recipe.stages import Stage
from compress.report.elements import section, table

if TYPE_CHECKING:
    from compress.model.context import Context
    from compress.rotate.job import RotateJob


class Rotate(StageRoom):
    """The stage `rotate`."""

    name = "rotate"
    summary = "rotate the hidden state and values: the same function, fewer outliers"

    def methods(self) -> Mapping[str, Any]:
        """See `compress.rotate`."""
        from compress.rotate import METHODS

        return METHODS

    def changes(self, stage: Stage) -> bool:
        """The function stays."""
        return False

    def check(self, context: Context, stage: Stage) -> RotateJob:
        """See `compress.rotate.job.prepare`."""
        from compress.rotate.job import prepare

        return prepare(context, stage)

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """What was rotated, and by how much the logits moved."""
        before, after = (f"{record[f'parameters_{when}']:,}" for when in ("before", "after"))
        return (
            _what(record),
            before,
            after,
            f"parameters {before} -> {after}, logits moved by {record['difference']:.1e}",
        )

    def report(self, manifest: Mapping[str, Any]) -> str:
        """What was rotated, and what the logits say."""
        passes = [made for made in manifest.get("passes") or [] if "rotate" in made]
        if not passes:
            return ""
        columns = ("rotated", "head", "logits moved by>", "parameters before>", "after>")
        rows = [
            (
                _what(made), "of its own" if made["untied"] else "as before", f"{made['difference']:.1e}",
                f"{made['parameters_before']:,}", f"{made['parameters_after']:,}",
            )
            for made in passes
        ]  # fmt: skip
        return section("What was rotated", table(columns, rows))


def _what(record: Mapping[str, Any]) -> str:
    """ "hidden state and values of 4 layers by hadamard"."""
    parts = ["hidden state"] if record["hidden"] else []
    parts += [f"values of {record['values']} layers"] if record["values"] else []
    return f"{' and '.join(parts) or 'nothing'} by {record['rotate']}"


STAGE = Rotate()
