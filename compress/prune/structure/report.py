"""Report section on structured pruning: units removed, error, and ranking of each pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from compress.report import charts
from compress.report.elements import Cell, error_cell, folded, section, table
from compress.report.facts import notes_text

Pass = Mapping[str, Any]
Row = list[Cell]


def structure_section(manifest: Mapping[str, Any]) -> str:
    """HTML: units removed by each pass; empty where none were."""
    passes = [made for made in manifest.get("passes") or [] if "remove" in made]
    if not passes:
        return ""
    content = table(
        ("removed", "ranked by", "before>", "after>", "parameters before>", "after>", "change>"),
        [_summary(made) for made in passes],
    )
    for number, made in enumerate(passes):
        content += _widths(made) + _measured(made) + _readers(made, number) + _ranks(made)
    return section("What was removed", content)


def units_after(record: Pass) -> str:
    """Units of a layer after the stage: "768", or "480 to 736" where layers differ."""
    widths = record.get("widths") or [record["after"]]
    return f"{min(widths):,}" if min(widths) == max(widths) else f"{min(widths):,} to {max(widths):,}"


def _summary(made: Pass) -> Row:
    before, after = made["parameters_before"], made["parameters_after"]
    return [
        (f"{made['unit']} ({made['remove']})" if made["unit"] != made["remove"] else made["unit"], ""), (made["method"], ""),
        (f"{made['before']:,}", "right"), (units_after(made), "right"), (f"{before:,}", "right"), (f"{after:,}", "right"),
        (f"{after / max(before, 1) - 1:+.1%}", "right"),
    ]  # fmt: skip


def _widths(made: Pass) -> str:
    """What each layer keeps, where they differ."""
    if "widths" not in made:
        return ""
    most = made["before"]
    rows = [
        [(str(layer), "right"), (f"{width:,}", "right"), (f"{width / most:.0%}", f"right meter {width / most:.3f}")]
        for layer, width in enumerate(made["widths"])
    ]
    return table(("layer>", f"{made['unit']}>", "of those before>"), rows)


def _measured(made: Pass) -> str:
    """The times that a latency budget was compared with."""
    found = made.get("measured")
    if not found:
        return ""
    whole = max(found["before"], 1e-12)
    rows = [
        [(f"{int(count):,}", "right"), (f"{1e3 * time:.4g} ms", "right"), (f"{time / whole:.0%}", f"right meter {time / whole:.3f}")]
        for count, time in found["seconds"].items()
    ]  # fmt: skip
    threads = f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    layers = " and ".join(map(str, found["layers"]))
    text = (
        f"Measured before: {found['of']} takes {1e3 * found['before']:.4g} ms of the whole model and about {1e3 * found['after']:.4g} ms "
        f"of the smaller one, on {found['device']} ({threads}), by models of zeros with {layers} layers."
    )
    return f"<p>{escape(text)}</p>" + table((f"{made['unit']}>", "time>", "of the whole>"), rows)


def _readers(made: Pass, number: int) -> str:
    """How far the layers moved that read what is gone."""
    layers = made.get("layers") or []
    known = [layer for layer in layers if layer.get("error") is not None]
    if not layers:
        return ""
    content = ""
    if known:
        what = "layers with experts gave" if made["remove"] == "experts" else f"layers that read {made['unit']} gave"
        text = f"How far what the {what} moved on the calibration text, relative to itself (squared norms)."
        content += f'<p class="soft">{escape(text)}</p>{charts.error_chart(known, f"cut{number}")}'
    worst = max((layer["error"] for layer in known), default=0.0) or 1.0
    rows = [_reader(layer, worst) for layer in layers]
    columns = ("layer", "before>", "after>", "error>", "damping>", "notes")
    return content + folded(table(columns, rows), len(rows), "layers")


def _reader(layer: Mapping[str, Any], worst: float) -> Row:
    damping = layer.get("damping")
    notes = [notes_text(layer.get("notes") or {})]
    if "experts" in layer:
        notes.insert(0, f"experts {', '.join(map(str, layer['experts']))}")
    return [
        (layer["name"], "name"), (f"{layer['units']:,}", "right"), (f"{layer['kept']:,}", "right"),
        error_cell(layer.get("error"), worst),
        ("–" if damping is None else f"{damping:g}", "right"), ("; ".join(note for note in notes if note), "notes"),
    ]  # fmt: skip


def _ranks(made: Pass) -> str:
    """Every layer with its rank, and whether it stays."""
    content = ""
    stacks: Sequence[Sequence[float]] = made.get("ranks") or []
    for number, (ranks, kept) in enumerate(zip(stacks, made.get("kept") or [], strict=False)):
        most = max(map(abs, ranks), default=0.0) or 1.0
        rows = [
            [
                (str(layer), "right"), (f"{rank:.4g}", f"right meter {abs(rank) / most:.3f}"),
                ("stays", "") if layer in kept else ("removed", "soft"),
            ]
            for layer, rank in enumerate(ranks)
        ]  # fmt: skip
        name = f" of the {('encoder', 'decoder')[number]}" if len(stacks) == 2 else ""
        text = f"Ranks of the layers{name} by {made['method']}: those with the least went."
        content += f'<p class="soft">{escape(text)}</p>'
        content += folded(table(("layer>", "rank>", ""), rows), len(rows), "layers")
    return content
