"""The charts of a report page, as SVG text."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.files import written_beside
from compress.core.imports import imports
from compress.report.facts import split_layer_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


# What all charts are drawn on: a matplotlib figure without global state, written as SVG that takes its look from the page.
#
# Two runs give the same text: no dates, no random ids.

COLORS = ("#3b82f6", "#14b8a6", "#f59e0b", "#f43f5e", "#8b5cf6", "#84cc16", "#06b6d4", "#d946ef", "#94a3b8", "#a16207")
# Stand-ins that no chart uses otherwise; in the SVG they become colours of the page, so that one chart suits light and dark.
INK, FAINT = "#010203", "#040506"


def color(number: int) -> str:
    """The colour of the series with this number."""
    return COLORS[number % len(COLORS)]


@contextmanager
def figure(
    width: float, height: float, ink: str = INK, faint: str = FAINT, ground: str = "none"
) -> Iterator[tuple[Figure, Axes]]:
    """A figure without global state: no pyplot, and whatever the user's matplotlibrc says is set aside."""
    with imports():
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
        drawn = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn, drawn.add_subplot()


#: Ink, faint lines and ground of pictures for pages whose colours are not known.
PRINTED = ("#334155", "#e2e8f0", "white")


def save(drawn: Figure, file: Path) -> None:
    """Write a figure to an .svg, .png or .pdf file; two calls give the same bytes."""
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}[file.suffix]
    with written_beside(file) as temporary:
        drawn.savefig(temporary, dpi=160, metadata=metadata, format=file.suffix[1:])


def legend_above(axes: Axes, lines: Sequence[Line2D] | None = None) -> None:
    """The legend over the axes, in one row if that fits, else in columns as wide as its longest word.

    Args:
        lines: what it names; None: all that the axes have.
    """
    handles = axes.get_legend_handles_labels()[0] if lines is None else list(lines)
    words = [str(handle.get_label()) for handle in handles]
    columns = -(-len(words) // legend_rows(words))
    axes.legend(
        handles, words, frameon=False, fontsize=9, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0), handlelength=1.0,
        borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip


def legend_rows(words: Sequence[str]) -> int:
    """Rows of a legend over axes that are 9 inches wide: one if the words fit, else columns are as wide as the longest word."""
    if sum(len(word) + 5 for word in words) <= 120:
        return 1
    return -(-len(words) // max(1, 110 // (max(map(len, words)) + 5)))


def log_where_wide(
    axes: Axes, values: Sequence[float], times: float = 8.0, shown: Callable[[float], str] = "{:g}".format
) -> None:
    """A logarithmic y axis where the largest value is more than so many times the smallest; `shown`: a tick in words."""
    if not values or not 0 < times * min(values) < max(values):
        return
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    if max(values) < 1e3 * min(values):  # over more decades they alone are enough
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: shown(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def svg(drawn: Figure, name: str, label: str = "") -> str:
    """The figure as an `<svg>` element to be put into a page: ids of its own, colours of the page; `label` says in words what it shows."""
    text = svg_file(drawn)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--line)")
    # The page decides about fonts (in the sizes that were laid out) and about the chart's width on the screen.
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    text = re.sub(r"<style type=\"text/css\">.*?</style>\s*", "", text, flags=re.DOTALL)
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height|version|xmlns(:xlink)?)="[^"]*"', "", opening)
    words = f' aria-label="{escape(label)}"' if label else ""
    return opening.replace("<svg", f'<svg class="chart" role="img"{words}', 1) + ">" + rest


def svg_file(drawn: Figure) -> str:
    """The figure as the text of an SVG file."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


PART_COLORS = {
    "embeddings": "#8b5cf6", "attention": "#3b82f6", "mlp": "#14b8a6", "norms": "#d946ef", "output head": "#06b6d4",
    "other": "#94a3b8", "scales and indices": "#f59e0b",
}  # fmt: skip
LOADED = {"draft": "#64748b", "calibrated cache files": "#a16207"}
"""Parts that are loaded besides the model's tensors, with their colours."""
_MARKERS = "osD^vP"
_LEGEND_LINE = 0.2  # inches


def error_chart(layers: Sequence[Mapping[str, Any]], name: str = "error") -> str:
    """SVG: relative output error of every compressed layer, by block, one colour a kind of layer. Empty without layers.

    Args:
        name: what ids begin with, different for each chart of a page.
    """
    return _layers_chart(layers, "error", "relative output error", lambda value: f"{100 * value:.3g}%", name)


def bits_chart(layers: Sequence[Mapping[str, Any]]) -> str:
    """SVG: bits per weight of every compressed layer, by block, with the kinds of layers side by side."""
    return _layers_chart(layers, "bits", "bits per weight", lambda value: f"{value:.3g}", "bits", beside=True)


def _layers_chart(
    layers: Sequence[Mapping[str, Any]],
    key: str,
    measured: str,
    shown: Callable[[float], str],
    name: str,
    beside: bool = False,
) -> str:
    """Points, not bars, which would lie on an axis that begins where the data does; lines join layers of one kind.

    Args:
        key: of a layer. measured: label of the axis. shown: a value in words. name: what ids begin with.
        beside: kinds have places beside each other and no lines, since their values are often the same.
    """
    blocks, series = _by_kind(layers, key)
    if not series:
        return ""
    rows = legend_rows(list(series))
    with figure(9.0, 3.2 + rows * _LEGEND_LINE) as (drawn, axes):
        for number, (kind, values) in enumerate(series.items()):
            place = 0.7 * ((number + 0.5) / len(series) - 0.5) if beside else 0.0
            at = [blocks.index(block) + place for block in values]
            look: dict[str, Any] = {"color": color(number), "marker": _MARKERS[number // len(COLORS) % len(_MARKERS)]}
            size = 4 if len(blocks) <= _MARKED else 2
            axes.plot(at, list(values.values()), markersize=size, linewidth=0.0 if beside else 1.0, label=kind, **look)
        step = max(1, math.ceil(len(blocks) / 20))
        axes.set_xticks(range(0, len(blocks), step), ["outside" if b < 0 else str(b) for b in blocks[::step]])
        axes.set_xlabel("block")
        log_where_wide(
            axes, [value for values in series.values() for value in values.values() if value > 0], shown=shown
        )
        if axes.get_yscale() == "linear":
            axes.ticklabel_format(axis="y", useOffset=False)
            axes.yaxis.set_major_formatter(lambda value, _: shown(value))
        axes.set_ylabel(measured)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        legend_above(axes)
        return svg(drawn, name)


def bytes_chart(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """SVG: two stacked bars, the source and the artifact, each split by where its bytes are (`PARTS`, `LOADED`)."""
    largest = max(sum(before.values()), sum(after.values()), 1)
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    scale, unit = next((scale, unit) for scale, unit in units if largest >= scale)
    with figure(9.0, 2.3) as (drawn, axes):
        left = [0.0, 0.0]
        for part, ink in (PART_COLORS | LOADED).items():
            values = [before.get(part, 0) / scale, after.get(part, 0) / scale]
            if any(values):
                axes.barh([1, 0], values, left=left, height=0.62, color=ink, label=part)
                left = [a + b for a, b in zip(left, values, strict=True)]
        longest = max(*left, 1e-9)
        for y, length in zip((1, 0), left, strict=True):
            axes.text(length + longest * 0.01, y, f"{length:.3g} {unit}", va="center", color=INK)
        axes.set_yticks([1, 0], ["before", "after"])
        axes.set_xlim(0, longest * 1.13)
        axes.set_xlabel(unit)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        legend_above(axes)
        return svg(drawn, "bytes")


def quality_chart(before: float, after: float) -> str:
    """SVG: perplexity of source and artifact. Empty when one of them is not a number that can be drawn."""
    if not (math.isfinite(before) and math.isfinite(after)):
        return ""
    with figure(9.0, 1.5) as (drawn, axes):
        axes.plot([before, after], [1, 0], color=FAINT, linewidth=1.5, zorder=1)
        for y, value, ink in ((1, before, COLORS[-2]), (0, after, COLORS[0])):
            axes.plot([value], [y], marker="o", markersize=9, color=ink)
            axes.annotate(f"{value:.4g}", (value, y), (9, 0), textcoords="offset points", va="center", color=INK)
        axes.set_yticks([1, 0], ["before", "after"])
        axes.set_ylim(-0.6, 1.6)
        if 0 < 8 * min(before, after) < max(before, after):
            axes.set_xscale("log")
            axes.margins(x=0.15)
        else:  # what differs by less than a few percent looks as if it did
            low, high = sorted((before, after))
            room = max(0.25 * (high - low), 0.02 * high)
            axes.set_xlim(max(low - room, 0.5 * low), high + 1.6 * room)
            axes.ticklabel_format(axis="x", useOffset=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        axes.set_xlabel("perplexity (lower is better)")
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        return svg(drawn, "quality")


def _by_kind(layers: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], dict[str, dict[int, float]]]:
    """Blocks in order, and {kind: {block: value}}, without values that are None or not finite."""
    series: dict[str, dict[int, float]] = {}
    blocks = []
    for layer in layers:
        block, kind = split_layer_name(layer["name"])
        if layer[key] is not None and math.isfinite(layer[key]):
            blocks.append(block)
            values = series.setdefault(kind, {})
            # Several layers of one kind in a block (experts): the largest stands for them.
            values[block] = max(layer[key], values.get(block, 0.0))
    # Layers outside of the blocks (block -1: embeddings, head) come last.
    return sorted(set(blocks), key=lambda block: (block < 0, block)), series


# What charts of a training share: what was measured after some updates as lines, and marks at updates that matter.

Entries = Sequence[Mapping[str, Any]]

TRAINED = "#94a3b8"
"""The colour of what rows in training say, which matters less than what held-out rows say."""
_LARGEST = 1e100  # matplotlib lays out axes in numbers a good deal larger than what they show
_MARKED = 60
"""Up to this many points each has a marker; with more they would hide the line."""


def number(value: Any) -> float:
    """A number of a curve; NaN where none was recorded, or none that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        return math.nan
    return float(value)


def values(entries: Entries, key: str) -> list[float]:
    """What was recorded under a key, an entry each."""
    return [number(entry.get(key)) for entry in entries]


@contextmanager
def by_updates(height: float, measured: str) -> Iterator[tuple[Figure, Axes]]:
    """A figure whose x axis counts updates."""
    from matplotlib.ticker import MaxNLocator

    with figure(9.0, height) as (drawn, axes):
        axes.set_xlabel("updates")
        axes.set_ylabel(measured)
        # "14.52", not "0.02" with "+1.45e1" far above it.
        axes.ticklabel_format(useOffset=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        yield drawn, axes


def line(axes: Axes, entries: Entries, numbers: Sequence[float], label: str, ink: str, width: float = 1.5) -> None:
    """A line through the numbers of entries; it is broken where one is NaN."""
    marker = "o" if len(entries) <= _MARKED else None
    steps = values(entries, "step")
    (drawn,) = axes.plot(steps, numbers, marker=marker, markersize=4, color=ink, label=label, linewidth=width)
    drawn.set_gid(_id(label))


def mark(axes: Axes, step: float, label: str, ink: str, dashes: str) -> None:
    """A vertical line at an update."""
    axes.axvline(step, color=ink, linestyle=dashes, linewidth=1.2, label=label).set_gid(_id(label))


def span(entries: Entries, numbers: Sequence[float], digits: str = ".4g") -> str:
    """The first and the last number of a line in words, "3.1 after 0 updates to 2.2 after 40"; empty where none is known."""
    steps = values(entries, "step")
    known = [(step, value) for step, value in zip(steps, numbers, strict=True) if math.isfinite(value)]
    if not known:
        return ""
    (first, one), (last, other) = known[0], known[-1]
    start = f"{one:{digits}} after {first:.0f} updates"
    return start if len(known) == 1 else f"{start} to {other:{digits}} after {last:.0f}"


def _id(label: str) -> str:
    return "curve-" + re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
