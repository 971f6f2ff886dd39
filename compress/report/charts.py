"""The charts of a report page, as SVG text."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.files import written_beside
from compress.report.facts import PARTS, split_layer_name

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
    fits = sum(len(word) + 5 for word in words) <= 120
    columns = len(words) if fits else max(1, 110 // (max(map(len, words)) + 5))
    axes.legend(
        handles, words, frameon=False, fontsize=9, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0), handlelength=1.0,
        borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip


def log_where_wide(axes: Axes, values: Sequence[float], times: float = 8.0) -> None:
    """A logarithmic y axis where the largest value is more than so many times the smallest."""
    if not 0 < times * min(values) < max(values):
        return
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    if max(values) < 1e3 * min(values):  # over more decades they alone are enough
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def svg(drawn: Figure, name: str, label: str = "") -> str:
    """The figure as an `<svg>` element to be put into a page: ids of its own, colours of the page; `label` says in words what it shows."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
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


PART_COLORS = {
    "embeddings": "#8b5cf6", "attention": "#3b82f6", "mlp": "#14b8a6", "norms": "#d946ef", "output head": "#06b6d4",
    "other": "#94a3b8", "scales and indices": "#f59e0b",
}  # fmt: skip
_GROUPED_BLOCKS = 8
"""Up to this many blocks each layer gets a bar; with more, bars would be hairlines and each kind of layer gets a line."""


def error_chart(layers: Sequence[Mapping[str, Any]], name: str = "error") -> str:
    """SVG: relative output error of every compressed layer, by block, one colour a kind of layer. Empty without layers.

    Args:
        name: what ids begin with, different for each chart of a page.
    """
    blocks, series = _by_kind(layers)
    if not series:
        return ""
    with figure(9.0, 3.4) as (drawn, axes):
        if len(blocks) <= _GROUPED_BLOCKS:
            _bars(axes, blocks, series)
        else:
            for number, (kind, values) in enumerate(series.items()):
                at = [blocks.index(block) for block in values]
                axes.plot(at, list(values.values()), marker="o", markersize=3, label=kind, color=color(number))
        step = max(1, math.ceil(len(blocks) / 16))
        names = ["outside" if block < 0 else f"block {block}" for block in blocks[::step]]
        axes.set_xticks(range(0, len(blocks), step), names)
        positive = [value for values in series.values() for value in values.values() if value > 0]
        if positive and max(positive) > 100 * min(positive):
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        axes.set_ylabel("relative output error")
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        legend_above(axes)
        return svg(drawn, name)


def bytes_chart(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """SVG: two stacked bars, the source and the artifact, each split by where its bytes are."""
    largest = max(sum(before.values()), sum(after.values()), 1)
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    scale, unit = next((scale, unit) for scale, unit in units if largest >= scale)
    with figure(9.0, 2.3) as (drawn, axes):
        left = [0.0, 0.0]
        for part in PARTS:
            values = [before.get(part, 0) / scale, after.get(part, 0) / scale]
            if any(values):
                axes.barh([1, 0], values, left=left, height=0.62, color=PART_COLORS[part], label=part)
                left = [a + b for a, b in zip(left, values, strict=True)]
        _label_bars(axes, left, f"{{:.3g}} {unit}", unit)
        legend_above(axes)
        return svg(drawn, "bytes")


def quality_chart(before: float, after: float) -> str:
    """SVG: perplexity of source and artifact. Empty when one of them is not a number that can be drawn."""
    if not (math.isfinite(before) and math.isfinite(after)):
        return ""
    with figure(9.0, 1.5) as (drawn, axes):
        axes.barh([1, 0], [before, after], height=0.62, color=[COLORS[-2], COLORS[0]])
        _label_bars(axes, [before, after], "{:.4g}", "perplexity (lower is better)")
        return svg(drawn, "quality")


def _label_bars(axes: Axes, lengths: Sequence[float], text: str, label: str) -> None:
    """Ticks, grid and end labels of two horizontal bars, before above after."""
    longest = max(*lengths, 1e-9)
    for y, length in zip((1, 0), lengths, strict=True):
        axes.text(length + longest * 0.01, y, text.format(length), va="center", color=INK)
    axes.set_yticks([1, 0], ["before", "after"])
    axes.set_xlim(0, longest * 1.13)
    axes.set_xlabel(label)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)


def _by_kind(layers: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[str, dict[int, float]]]:
    """Blocks in order, and {kind: {block: error}}; an error that is None or not finite is left out."""
    series: dict[str, dict[int, float]] = {}
    blocks = []
    for layer in layers:
        block, kind = split_layer_name(layer["name"])
        if layer["error"] is not None and math.isfinite(layer["error"]):
            blocks.append(block)
            values = series.setdefault(kind, {})
            # Several layers of one kind in a block (experts): the worst stands for them.
            values[block] = max(layer["error"], values.get(block, 0.0))
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
            axes.bar(x, series[kind][block], width * 0.9, color=color(number), label=label)
            drawn.add(kind)


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
