"""What charts of a training share: what was measured after some updates as lines, and marks at updates that matter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compress.report.canvas import FAINT, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
