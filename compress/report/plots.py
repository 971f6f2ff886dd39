"""The charts of a report, drawn by matplotlib as SVG text that takes its colours and its font from the page around it.

Two runs give the same text: no dates, no random ids.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.report.facts import PARTS, split_layer_name
from runtime.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#3b82f6", "#14b8a6", "#f59e0b", "#f43f5e", "#8b5cf6", "#84cc16", "#06b6d4", "#d946ef", "#94a3b8", "#a16207")
PART_COLORS = {
    "embeddings": "#8b5cf6", "attention": "#3b82f6", "mlp": "#14b8a6", "norms": "#d946ef", "output head": "#06b6d4",
    "other": "#94a3b8", "scales and indices": "#f59e0b",
}  # fmt: skip
# Stand-ins that no chart uses otherwise; in the SVG they become colours of the page, so that one chart suits light and dark.
_INK, _FAINT = "#010203", "#040506"
_GROUPED_BLOCKS = 8
"""Up to this many blocks each layer gets a bar; with more, bars would be hairlines and each kind of layer gets a line."""


def error_chart(layers: Sequence[Mapping[str, Any]]) -> str:
    """SVG: relative output error of every compressed layer, by block, one colour a kind of layer. Empty without layers."""
    blocks, series = _by_kind(layers, "error")
    if not series:
        return ""
    with _figure(9.0, 3.4) as (figure, axes):
        if len(blocks) <= _GROUPED_BLOCKS:
            _bars(axes, blocks, series)
        else:
            for number, (kind, values) in enumerate(series.items()):
                at = [blocks.index(block) for block in values]
                axes.plot(at, list(values.values()), marker="o", markersize=3, label=kind, color=_color(number))
        step = max(1, math.ceil(len(blocks) / 16))
        axes.set_xticks(range(0, len(blocks), step), [_block_label(block) for block in blocks[::step]])
        positive = [value for values in series.values() for value in values.values() if value > 0]
        if positive and max(positive) > 100 * min(positive):
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        axes.set_ylabel("relative output error")
        axes.grid(axis="y", color=_FAINT, linewidth=0.8)
        _legend_above(axes)
        return _svg(figure, "error")


def bytes_chart(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """SVG: two stacked bars, the source and the artifact, each split by where its bytes are."""
    largest = max(sum(before.values()), sum(after.values()), 1)
    scale, unit = next(
        ((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= s), (1, "B")
    )
    with _figure(9.0, 2.3) as (figure, axes):
        left = [0.0, 0.0]
        for part in PARTS:
            values = [before.get(part, 0) / scale, after.get(part, 0) / scale]
            if any(values):
                axes.barh([1, 0], values, left=left, height=0.62, color=PART_COLORS[part], label=part)
                left = [a + b for a, b in zip(left, values, strict=True)]
        for y, total in ((1, left[0]), (0, left[1])):
            axes.text(total + largest / scale * 0.01, y, f"{total:.3g} {unit}", va="center", color=_INK)
        axes.set_yticks([1, 0], ["before", "after"])
        axes.set_xlim(0, largest / scale * 1.13)
        axes.set_xlabel(unit)
        axes.grid(axis="x", color=_FAINT, linewidth=0.8)
        _legend_above(axes)
        return _svg(figure, "bytes")


def quality_chart(before: float, after: float) -> str:
    """SVG: perplexity of source and artifact. Empty when one of them is not a number that can be drawn."""
    if not (math.isfinite(before) and math.isfinite(after)):
        return ""
    with _figure(9.0, 1.5) as (figure, axes):
        axes.barh([1, 0], [before, after], height=0.62, color=[COLORS[-2], COLORS[0]])
        for y, value in ((1, before), (0, after)):
            axes.text(value + max(before, after) * 0.01, y, f"{value:.4g}", va="center", color=_INK)
        axes.set_yticks([1, 0], ["before", "after"])
        axes.set_xlim(0, max(before, after) * 1.13)
        axes.set_xlabel("perplexity (less is better)")
        axes.grid(axis="x", color=_FAINT, linewidth=0.8)
        return _svg(figure, "quality")


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
                raise RequestError(
                    f"the plot needs {key} of '{row.get('label', row.get('method'))}', which is {value!r}"
                )
    points = [row for row in rows if not row.get("reference")]
    if not points:
        raise RequestError("the plot has no points: none of what was given is a compressed model with an evaluation")
    # A picture for pages whose colours are not known: white ground, dark ink.
    with _figure(8.0, 4.6, ink="#334155", faint="#e2e8f0", ground="white") as (figure, axes):
        _tradeoff(axes, points, [row for row in rows if row.get("reference")])
        if title:
            axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        written = [path.with_suffix(suffix) for suffix in suffixes]
        for file in written:
            metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}[file.suffix]
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(file, dpi=160, metadata=metadata)
            except OSError as error:
                raise RequestError(f"the plot cannot be written to {file}: {error.strerror or error}") from None
    return written


def _tradeoff(axes: Axes, points: list[Mapping[str, Any]], references: list[Mapping[str, Any]]) -> None:
    methods = list(dict.fromkeys(str(row["method"]) for row in points))
    for number, method in enumerate(methods):
        own = sorted((row for row in points if str(row["method"]) == method), key=lambda row: row["bytes"])
        x, y = [row["bytes"] / 1e6 for row in own], [row["perplexity"] for row in own]
        axes.plot(x, y, marker="o", markersize=7, linewidth=1.6, color=_color(number), label=method)
        for row, x_i, y_i in zip(own, x, y, strict=True):
            if row.get("label"):
                axes.annotate(str(row["label"]), (x_i, y_i), xytext=(6, 6), textcoords="offset points", fontsize=8.5)
    for row in references:
        label = row.get("label") or f"{row['method']} ({row['bytes'] / 1e6:.1f} MB)"
        axes.axhline(row["perplexity"], linestyle="--", linewidth=1.2, color="#64748b", label=label)
    values = [row["perplexity"] for row in [*points, *references]]
    if max(values) > 8 * min(values):
        axes.set_yscale("log")
    axes.margins(x=0.1, y=0.12)
    axes.set_xlabel("size of the weights (MB)")
    axes.set_ylabel("perplexity on held-out text")
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)


# -------------------------------------------------------------------- shared
def _by_kind(layers: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], dict[str, dict[int, float]]]:
    """Blocks in order, and {kind: {block: value}}; a value that is not finite is left out."""
    series: dict[str, dict[int, float]] = {}
    blocks = []
    for layer in layers:
        block, kind = split_layer_name(layer["name"])
        if math.isfinite(layer[key]):
            blocks.append(block)
            values = series.setdefault(kind, {})
            # Several layers of one kind in a block (experts): the worst stands for them.
            values[block] = max(layer[key], values.get(block, 0.0))
    # Layers outside of the blocks (block -1: embeddings, head) come last.
    return sorted(set(blocks), key=lambda block: (block < 0, block)), series


def _bars(axes: Axes, blocks: list[int], series: dict[str, dict[int, float]]) -> None:
    """Grouped bars: each block's bars are centred on its tick, however many kinds of layers it has."""
    width = 0.86 / max(1, len(series))
    drawn: set[str] = set()
    for at, block in enumerate(blocks):
        kinds = [(number, kind) for number, kind in enumerate(series) if block in series[kind]]
        for place, (number, kind) in enumerate(kinds):
            x = at + (place - (len(kinds) - 1) / 2) * width
            label = None if kind in drawn else kind
            axes.bar(x, series[kind][block], width * 0.9, color=_color(number), label=label)
            drawn.add(kind)


def _block_label(block: int) -> str:
    return "outside" if block < 0 else f"block {block}"


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _legend_above(axes: Axes) -> None:
    """The legend over the axes, in as many columns as its longest word leaves room for."""
    words = axes.get_legend_handles_labels()[1]
    columns = max(1, min(len(words), 110 // (max(map(len, words)) + 5)))
    axes.legend(
        frameon=False, fontsize=9, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0), handlelength=1.0,
        borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip


@contextmanager
def _figure(
    width: float, height: float, ink: str = _INK, faint: str = _FAINT, ground: str = "none"
) -> Iterator[tuple[Figure, Axes]]:
    """A figure without global state: no pyplot, and whatever the user's matplotlibrc says is set aside."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        **matplotlib.rcParamsDefault, "svg.fonttype": "none", "svg.hashsalt": "compress", "font.size": 10, "text.color": ink,
        "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": faint, "axes.facecolor": "none",
        "figure.facecolor": ground, "savefig.facecolor": ground, "axes.spines.top": False, "axes.spines.right": False,
        "axes.axisbelow": True, "legend.labelcolor": ink, "axes.unicode_minus": False,
    }  # fmt: skip
    style.pop("backend", None)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.add_subplot()


def _svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element to be put into a page: ids of its own, colours of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = text.replace(_INK, "currentColor").replace(_FAINT, "var(--line)")
    # The page decides about fonts (in the sizes that were laid out) and about the chart's width on the screen.
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    text = re.sub(r"<style type=\"text/css\">.*?</style>\s*", "", text, flags=re.DOTALL)
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height|version|xmlns(:xlink)?)="[^"]*"', "", opening)
    return opening.replace("<svg", '<svg class="chart" role="img"', 1) + ">" + rest
