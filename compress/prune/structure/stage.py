"""Stage `structure`: whole channels, heads, layers, experts, dimensions or tokens are removed, and the shapes shrink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from compress.model.stage import StageRoom
from compress.recipe.stages import Stage
from compress.report import charts
from compress.report.elements import Cell, error_cell, folded, note, section, table
from compress.report.facts import notes_text

if TYPE_CHECKING:
    from compress.model.context import Context
    from compress.prune.structure.job import StructureJob


class Structure(StageRoom):
    """The stage `structure`."""

    name = "structure"
    summary = "remove channels, heads, layers, experts: smaller shapes"

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
        before, after, change = _parameters(record)
        what = f"{record['unit']} by {record['method']}"
        return what, f"{record['before']:,}", units_after(record), f"parameters {before} -> {after} ({change})"

    def report(self, manifest: Mapping[str, Any]) -> str:
        """Units, error and ranking of each pass."""
        passes = [made for made in manifest.get("passes") or [] if "remove" in made]
        if not passes:
            return ""
        columns = ("removed", "ranked by", "before>", "after>", "parameters before>", "after>", "change>")
        content = table(columns, map(_summary, passes))
        for number, made in enumerate(passes):
            content += "".join([*_widths(made), *_measured(made), *_readers(made, number), *_ranks(made)])
        return section("What was removed", content)


def units_after(record: Mapping[str, Any]) -> str:
    """Units of a layer after the stage: "768", or "480 to 736" where layers differ."""
    widths = record.get("widths") or [record["after"]]
    return f"{min(widths):,}" if min(widths) == max(widths) else f"{min(widths):,} to {max(widths):,}"


def _parameters(made: Mapping[str, Any]) -> tuple[str, str, str]:
    """Before, after, and the change."""
    before, after = made["parameters_before"], made["parameters_after"]
    return f"{before:,}", f"{after:,}", f"{after / max(before, 1) - 1:+.1%}"


def _summary(made: Mapping[str, Any]) -> list[Cell]:
    unit, what = made["unit"], made["remove"]
    removed = f"{unit} ({what})" if unit != what else unit
    return [removed, made["method"], f"{made['before']:,}", units_after(made), *_parameters(made)]


def _widths(made: Mapping[str, Any]) -> Iterator[str]:
    """What each layer keeps, where they differ."""
    if "widths" in made:
        shares = [width / made["before"] for width in made["widths"]]
        rows = [
            (str(layer), f"{width:,}", (f"{share:.0%}", f"meter {share:.3f}"))
            for layer, (width, share) in enumerate(zip(made["widths"], shares, strict=True))
        ]
        yield table(("layer>", f"{made['unit']}>", "of those before>"), rows)


def _measured(made: Mapping[str, Any]) -> Iterator[str]:
    """The times that a latency budget was compared with."""
    found = made.get("measured")
    if not found:
        return
    threads = f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    layers = " and ".join(map(str, found["layers"]))
    text = (
        f"Measured before: {found['of']} takes {1e3 * found['before']:.4g} ms of the whole model and about {1e3 * found['after']:.4g} ms "
        f"of the smaller one, on {found['device']} ({threads}), by models of zeros with {layers} layers."
    )
    yield f"<p>{escape(text)}</p>"
    whole, rows = max(found["before"], 1e-12), []
    for count, time in found["seconds"].items():
        share = time / whole
        rows.append((f"{int(count):,}", f"{1e3 * time:.4g} ms", (f"{share:.0%}", f"meter {share:.3f}")))
    yield table((f"{made['unit']}>", "time>", "of the whole>"), rows)


def _readers(made: Mapping[str, Any], number: int) -> Iterator[str]:
    """How far the layers moved that read what is gone."""
    layers = made.get("layers") or []
    if not layers:
        return
    known = [layer for layer in layers if layer.get("error") is not None]
    if known:
        what = "layers with experts" if made["remove"] == "experts" else f"layers that read {made['unit']}"
        yield note(f"How far what the {what} gave moved on the calibration text, relative to itself (squared norms).")
        yield charts.error_chart(known, f"cut{number}")
    worst = max((layer["error"] for layer in known), default=0.0) or 1.0
    rows: list[list[Cell]] = []
    for layer in layers:
        experts, damping = layer.get("experts"), layer.get("damping")
        notes = [f"experts {', '.join(map(str, experts))}" if experts else "", notes_text(layer.get("notes") or {})]
        rows.append(
            [
                (layer["name"], "name"), f"{layer['units']:,}", f"{layer['kept']:,}", error_cell(layer.get("error"), worst),
                "–" if damping is None else f"{damping:g}", ("; ".join(filter(None, notes)), "notes"),
            ]
        )  # fmt: skip
    columns = ("layer", "before>", "after>", "error>", "damping>", "notes")
    yield folded(table(columns, rows), len(rows), "layers")


def _ranks(made: Mapping[str, Any]) -> Iterator[str]:
    """Every layer with its rank, and whether it stays."""
    stacks = made.get("ranks") or []
    for number, (ranks, kept) in enumerate(zip(stacks, made.get("kept") or [], strict=False)):
        most = max(map(abs, ranks), default=0.0) or 1.0
        name = f" of the {('encoder', 'decoder')[number]}" if len(stacks) == 2 else ""
        yield note(f"Ranks of the layers{name} by {made['method']}: those with the least went.")
        rows = [
            (
                str(layer),
                (f"{rank:.4g}", f"meter {abs(rank) / most:.3f}"),
                "stays" if layer in kept else ("removed", "soft"),
            )
            for layer, rank in enumerate(ranks)
        ]
        yield folded(table(("layer>", "rank>", ""), rows), len(rows), "layers")


STAGE = Structure()
