"""Comparison of several artifacts: rows for a table, and the plot of size against perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.report.charts import PRINTED, color, figure, log_where_wide, save
from compress.report.facts import Facts, gather
from runtime.checkpoint.artifact import shown
from runtime.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def comparison(artifacts: Sequence[str | Path]) -> list[dict[str, Any]]:
    """A row for each artifact, and one for the model they were all made from (`reference: True`) where that was measured.

    A row has `path`, `label` (the recipe's directory name), `method`, `bytes`, `bits_per_weight` of the compressed layers,
    `perplexity` (None when the recipe asked for no evaluation).

    Raises:
        ArtifactError: not an artifact. RequestError: the artifacts were measured on different text or come from different
            models, so that their numbers cannot be compared.
    """
    facts: list[Facts] = []
    for path in artifacts:
        with shown(Path(path)):
            facts.append(gather(path))
            _row(facts[-1])  # what it would be shown as
    _check_comparable(facts)
    rows = [_row(fact) for fact in facts]
    first = next((fact for fact in facts if "after" in fact.metrics), None)
    if first is not None:
        source: dict[str, Any] = {
            "path": None, "label": "uncompressed", "method": "uncompressed", "bytes": first.bytes_before,
            "perplexity": first.metrics["before"]["perplexity"], "bits_per_weight": None, "reference": True,
        }  # fmt: skip
        rows.insert(0, source)
    return rows


def _row(fact: Facts) -> dict[str, Any]:
    methods = sorted({layer["method"] for layer in fact.layers})
    return {
        "path": str(fact.path), "label": fact.path.resolve().name, "method": ", ".join(methods) or "nothing compressed",
        "bytes": fact.bytes_after, "bits_per_weight": fact.layer_bits,
        "perplexity": fact.metrics["after"]["perplexity"] if "after" in fact.metrics else None,
    }  # fmt: skip


def _check_comparable(facts: list[Facts]) -> None:
    models = [(fact.manifest.get("source") or {}).get("fingerprint") for fact in facts]
    for what, found in (("made from different models", models), ("evaluated on different text", map(_text, facts))):
        one, *others = found
        for fact, other in zip(facts[1:], others, strict=True):
            if one is not None and other is not None and one != other:
                raise RequestError(f"{facts[0].path} and {fact.path} were {what}; their numbers cannot be compared")


def _text(fact: Facts) -> Any:
    """What the same model gives on the same text: a perplexity of the source that differs means another text."""
    if "before" not in fact.metrics:
        return None
    return fact.metrics["tokens"], fact.metrics["sequence_length"], round(fact.metrics["before"]["perplexity"], 4)


def plot_tradeoff(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> list[Path]:
    """Draw size against perplexity, one point a row; rows with the same `method` share a colour and are joined by a line.

    Args:
        rows: each has `method`, `bytes`, `perplexity`; `label` stands beside the point; a row with `reference: True` (the
            uncompressed model) is drawn as a dashed line to compare with.
        path: a file ending in .svg, .png or .pdf; without an ending both PATH.svg and PATH.png are written.

    Returns:
        The files written.

    Raises:
        RequestError: nothing to draw, a row without a finite number, or an ending that is none of the above.
    """
    path = Path(path)
    suffixes = [path.suffix] if path.suffix else [".svg", ".png"]
    if suffixes[0] not in (".svg", ".png", ".pdf"):
        raise RequestError(f"a plot cannot be written as '{path.name}'; allowed endings: .svg, .png, .pdf")
    for row in rows:
        for key in ("bytes", "perplexity"):
            value = row.get(key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                name = row.get("label", row.get("method"))
                raise RequestError(f"{key} of '{name}' cannot be drawn: {value!r} is no finite number above 0")
    points = [row for row in rows if not row.get("reference")]
    if not points:
        raise RequestError("the plot has no points: none of what was given is a compressed model with an evaluation")
    with figure(8.0, 4.6, *PRINTED) as (drawn, axes):
        _tradeoff(axes, points, [row for row in rows if row.get("reference")])
        if title:
            axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        written = [path.with_suffix(suffix) for suffix in suffixes]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for file in written:
                save(drawn, file)
        except OSError as error:
            raise RequestError(f"the plot cannot be written to {path}: {error.strerror or error}") from None
    return written


def _tradeoff(axes: Axes, points: list[Mapping[str, Any]], references: list[Mapping[str, Any]]) -> None:
    methods = list(dict.fromkeys(str(row["method"]) for row in points))
    labels: list[tuple[float, float, str, str]] = []
    for number, method in enumerate(methods):
        own = sorted((row for row in points if str(row["method"]) == method), key=lambda row: row["bytes"])
        x, y = [row["bytes"] / 1e6 for row in own], [row["perplexity"] for row in own]
        axes.plot(x, y, marker="o", markersize=7, linewidth=1.6, color=color(number), label=method)
        named = [row for row in own if row.get("label")]
        labels += [(row["bytes"] / 1e6, row["perplexity"], str(row["label"]), color(number)) for row in named]
    for row in references:
        label = row.get("label") or f"{row['method']} ({row['bytes'] / 1e6:.1f} MB)"
        axes.axhline(row["perplexity"], linestyle="--", linewidth=1.2, color="#64748b", label=label)
    log_where_wide(axes, [row["perplexity"] for row in [*points, *references]])
    label_axes(axes, "size of the weights (MB)", "perplexity on held-out text", PRINTED[1], labels)


def label_axes(axes: Axes, x: str, y: str, faint: str, labels: list[tuple[float, float, str, str]]) -> None:
    """Words of both axes, a grid, a legend, and labels of points; see `_place_labels`."""
    axes.margins(x=0.1, y=0.12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color=faint, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)
    _place_labels(axes, labels)


def _place_labels(axes: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) beside its point, wherever it hides least of the points and labels that are there already."""
    scale = 72 / axes.figure.get_dpi()  # pixels to points, the unit of offsets
    axes.figure.canvas.draw()  # axes get their place and their limits only now
    place = axes.transData.transform
    taken = [(*(place((x, y)) * scale - 4), 8.0, 8.0) for x, y, _, _ in labels]
    for x, y, text, ink in labels:
        at_x, at_y = place((x, y)) * scale
        width, height = 4.8 * len(text), 10.0
        left, middle = -6 - width, -width / 2
        offsets = [(6, 4), (6, -12), (left, 4), (left, -12), (middle, 8), (middle, -17), (14, -4), (6, 16)]
        boxes = [(at_x + dx, at_y + dy, width, height) for dx, dy in offsets]
        hidden = [sum(_overlap(box, other) for other in taken) + _outside(axes, box, scale) for box in boxes]
        best = hidden.index(min(hidden))
        taken.append(boxes[best])
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": ink, "annotation_clip": False}
        axes.annotate(text, (x, y), xytext=offsets[best], **style)


def _outside(axes: Axes, box: tuple[float, ...], scale: float) -> float:
    """Area of a box (in points) that lies beyond the right or the left edge of the axes."""
    frame = axes.get_window_extent()
    beyond = max(0.0, box[0] + box[2] - frame.x1 * scale) + max(0.0, frame.x0 * scale - box[0])
    return beyond * box[3]


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Area that two boxes (x, y, width, height) share."""
    sides = (min(one[i] + one[i + 2], other[i] + other[i + 2]) - max(one[i], other[i]) for i in (0, 1))
    return math.prod(max(0.0, side) for side in sides)
