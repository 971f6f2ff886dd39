"""What all charts are drawn on: a matplotlib figure without global state, written as SVG that takes its look from the page.

Two runs give the same text: no dates, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def svg(drawn: Figure, name: str) -> str:
    """The figure as an `<svg>` element to be put into a page: ids of its own, colours of the page."""
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
    return opening.replace("<svg", '<svg class="chart" role="img"', 1) + ">" + rest
