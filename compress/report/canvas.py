"""What all charts are drawn on: a matplotlib figure without global state, written as SVG that takes its look from the page.

Two runs give the same text: no dates, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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
