"""The charts of a recovery: its losses by updates, and the perplexity of held-out rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compress.report.canvas import COLORS, INK, color, legend_above, log_where_wide, svg
from compress.report.curves import TRAINED, Entries, by_updates, line, mark, number, span, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST = 700.0  # nats of a cross-entropy; the exponential of more is no number


def loss_chart(made: Mapping[str, Any], name: str) -> str:
    """SVG: the loss of rows in training and of held-out rows. Empty where no number of them is known.

    Args:
        made: facts of a pass `recover`.
        name: what ids begin with, different for each chart of a page.
    """
    trained, looks = made["curve"].get("train") or [], made["curve"].get("held_out") or []
    lines = [("training", trained, values(trained, "loss"), TRAINED)]
    lines += [(label, looks, found, ink) for label, found, ink in _widths(looks, "loss", 0)]
    return _chart(made, lines, "loss", 2.9, f"{name}-loss")


def perplexity_chart(made: Mapping[str, Any], name: str) -> str:
    """SVG: the perplexity of held-out rows; arguments as of `loss_chart`. Empty where the model says no next token."""
    looks = made["curve"].get("held_out") or []
    lines = [
        (label, looks, [perplexity(value) for value in found], ink)
        for label, found, ink in _widths(looks, "cross_entropy", 1)
    ]
    return _chart(made, lines, "perplexity", 2.5, f"{name}-perplexity")


def perplexity(cross_entropy: Any) -> float:
    """Of a cross-entropy as recorded; NaN where that is none, or so large that it cannot be drawn."""
    value = number(cross_entropy)
    return math.nan if math.isnan(value) else number(math.exp(min(value, _LARGEST)))


def _widths(looks: Entries, key: str, first: int) -> list[tuple[str, list[float], str]]:
    """Label, numbers and colour: of what is measured as a whole, and of each width of a model with nested ones."""
    matches = {match for look in looks for name in look if (match := re.fullmatch(rf"{key}_(\d+)", name)) is not None}
    widths = sorted({int(match[1]) for match in matches})
    label = "held-out rows, mean of the widths" if widths else "held-out rows"
    found = [(label, values(looks, key), color(first))]
    for place, width in enumerate(widths):
        found.append((f"{width:,} channels", values(looks, f"{key}_{width}"), color(4 + place)))
    return found


def _chart(
    made: Mapping[str, Any], lines: list[tuple[str, Entries, list[float], str]], what: str, height: float, name: str
) -> str:
    known = [value for _, _, numbers, _ in lines for value in numbers if math.isfinite(value)]
    if not known:
        return ""
    told = []
    with by_updates(height, what) as (drawn, axes):
        for label, entries, numbers, ink in lines:
            text = span(entries, numbers)
            if text:
                told.append(f"{label} {text}")
                line(axes, entries, numbers, label, ink)
        told += _marks(axes, made)
        log_where_wide(axes, known)
        legend_above(axes)
        return svg(drawn, name, f"{what} by updates: {'; '.join(told)}")


def _marks(axes: Axes, made: Mapping[str, Any]) -> list[str]:
    """Where the weights that are kept were taken, and where a training diverged; the same in words."""
    found = []
    best = number(made.get("best_step"))
    if math.isfinite(best):
        found.append(f"best weights after {best:.0f}")
        mark(axes, best, found[-1], INK, ":")
    steps = number(made.get("steps"))
    if made.get("ended") == "diverged" and math.isfinite(steps):
        found.append(f"diverged after {steps:.0f}")
        mark(axes, steps, found[-1], COLORS[3], "--")
    return found
