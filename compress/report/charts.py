"""The charts of a report page, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compress.report.canvas import COLORS, FAINT, INK, color, figure, legend_above, svg
from compress.report.facts import PARTS, split_layer_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    blocks, series = _by_kind(layers, "error")
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
        axes.set_xticks(range(0, len(blocks), step), [_block_label(block) for block in blocks[::step]])
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
    scale, unit = next(
        ((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= s), (1, "B")
    )
    with figure(9.0, 2.3) as (drawn, axes):
        left = [0.0, 0.0]
        for part in PARTS:
            values = [before.get(part, 0) / scale, after.get(part, 0) / scale]
            if any(values):
                axes.barh([1, 0], values, left=left, height=0.62, color=PART_COLORS[part], label=part)
                left = [a + b for a, b in zip(left, values, strict=True)]
        for y, total in ((1, left[0]), (0, left[1])):
            axes.text(total + largest / scale * 0.01, y, f"{total:.3g} {unit}", va="center", color=INK)
        axes.set_yticks([1, 0], ["before", "after"])
        axes.set_xlim(0, largest / scale * 1.13)
        axes.set_xlabel(unit)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        legend_above(axes)
        return svg(drawn, "bytes")


def quality_chart(before: float, after: float) -> str:
    """SVG: perplexity of source and artifact. Empty when one of them is not a number that can be drawn."""
    if not (math.isfinite(before) and math.isfinite(after)):
        return ""
    with figure(9.0, 1.5) as (drawn, axes):
        axes.barh([1, 0], [before, after], height=0.62, color=[COLORS[-2], COLORS[0]])
        for y, value in ((1, before), (0, after)):
            axes.text(value + max(before, after) * 0.01, y, f"{value:.4g}", va="center", color=INK)
        axes.set_yticks([1, 0], ["before", "after"])
        axes.set_xlim(0, max(before, after) * 1.13)
        axes.set_xlabel("perplexity (less is better)")
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        return svg(drawn, "quality")


# -------------------------------------------------------------------- shared
def _by_kind(layers: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], dict[str, dict[int, float]]]:
    """Blocks in order, and {kind: {block: value}}; a value that is none or not finite is left out."""
    series: dict[str, dict[int, float]] = {}
    blocks = []
    for layer in layers:
        block, kind = split_layer_name(layer["name"])
        if layer[key] is not None and math.isfinite(layer[key]):
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
            axes.bar(x, series[kind][block], width * 0.9, color=color(number), label=label)
            drawn.add(kind)


def _block_label(block: int) -> str:
    return "outside" if block < 0 else f"block {block}"
