"""Comparison of several artifacts: rows for a table, and the plot of size against perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.report.charts import PRINTED, color, figure, log_where_wide, save
from compress.report.facts import Facts, gather
from runtime.checkpoint.artifact import shown
from runtime.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox


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
    """Words of both axes, a grid, a legend, and labels of points; see `place_labels`."""
    axes.margins(x=0.1, y=0.12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color=faint, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)
    place_labels(axes, labels)


_DISTANCES = (7.0, 15.0, 26.0, 40.0)  # points between a label and what it names; from the third on a line joins them
_DIRECTIONS = [(math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)) for turn in (1, *range(16))]


def place_labels(axes: Axes, labels: list[tuple[float, float, str, str]], size: float = 9.0) -> None:
    """Write (x, y, text, colour) near its point, wherever it hides least of points, lines, legend and labels that are there already.

    Args:
        size: of the letters, in points.
    """
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # axes get their place and their limits only now
    point, frame, drawn = axes.figure.get_dpi() / 72, axes.get_window_extent(), _drawn(axes)
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent()]
    taken += [
        Bbox.from_extents(*(at - 4 * point), *(at + 4 * point))
        for at in (axes.transData.transform((x, y)) for x, y, *_ in labels)
    ]
    for x, y, text, ink in labels:
        at = axes.transData.transform((x, y))
        measured = axes.annotate(text, (x, y), fontsize=size)
        width, height = measured.get_window_extent().size
        measured.remove()
        best = (math.inf, 0.0, 0.0, 0.0)
        for distance in _DISTANCES:
            for across, up in _DIRECTIONS:
                left = at[0] + across * distance * point + (across - 1) / 2 * width
                low = at[1] + up * distance * point + (up - 1) / 2 * height
                box = Bbox.from_bounds(left, low, width, height)
                hidden = sum(_overlap(box, other) for other in taken) + width * height - _overlap(box, frame)
                cost = hidden / height + point * (5 * box.padded(2 * point).count_contains(drawn) + 0.25 * distance)
                best = min(best, (cost, left, low, distance), key=lambda place: place[0])
        _, left, low, distance = best
        taken.append(Bbox.from_bounds(left, low, width, height).padded(3 * point, 0))
        line = (
            {"arrowstyle": "-", "color": ink, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            if distance > _DISTANCES[1]
            else None
        )
        axes.annotate(
            text, (x, y), xytext=((left - at[0]) / point, (low - at[1]) / point), textcoords="offset points", fontsize=size, color=ink,
            annotation_clip=False, arrowprops=line,
        )  # fmt: skip


def _drawn(axes: Axes) -> np.ndarray:
    """Points `[n, 2]` (pixels) that markers cover and lines run through, close to each other."""
    import numpy as np
    from matplotlib.cbook import STEP_LOOKUP_MAP

    found = [np.empty((0, 2))]
    found += [those.get_offset_transform().transform(those.get_offsets()) for those in axes.collections]
    for line in axes.lines:
        steps = STEP_LOOKUP_MAP[line.get_drawstyle()]
        at = line.get_transform().transform(np.column_stack(steps(*line.get_data(orig=False))))
        found.append(at)
        if line.get_linestyle() != "None":
            for one, other in pairwise(at):
                count = min(1000, int(np.hypot(*(other - one)) / 3)) if np.isfinite((one, other)).all() else 0
                found.append(np.linspace(one, other, count + 2))
    return np.concatenate(found)


def _overlap(one: Bbox, other: Bbox) -> float:
    """Area that two boxes share."""
    width, height = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))
