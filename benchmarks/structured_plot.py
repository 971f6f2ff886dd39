#!/usr/bin/env python
"""What benchmarks/structured.py measured, drawn: perplexity against parameters and against measured latency, a row a model.

python benchmarks/structured_plot.py bundled.json gpt2.json --out docs/images/structure.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from structured import RANKINGS

from compress.report.charts import PRINTED, figure, save

Cell = dict[str, Any]
COLOURS = dict(zip(RANKINGS, ("#888888", "#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#1f77b4"), strict=True))


HIGHEST = 3.2  # times the perplexity of the whole model, as far as is drawn
KINDS = {"heads": "s", "layers": "^", "hidden": "D", "widths": "x"}  # what else is removed, or how; markers


def draw(axis: Any, cells: list[Cell], along: Callable[[Cell], float]) -> None:
    """Channels. Dotted: as the readers were. Lines: refitted. Stars: recovered as well."""
    for method in RANKINGS:
        own = [cell for cell in cells if cell["method"] == method]
        for fitted, style in ((False, ":"), (True, "-")):
            line = [cell for cell in own if cell["reconstruct"] is fitted and not cell["recovered"]]
            line.sort(key=along)
            axis.plot(
                [along(cell) for cell in line], [cell["perplexity"] for cell in line], style, marker=".", linewidth=1.2,
                color=COLOURS[method], label=method if fitted else None,
            )  # fmt: skip
        stars = [cell for cell in own if cell["recovered"]]
        axis.plot([along(c) for c in stars], [c["perplexity"] for c in stars], "*", markersize=9, color=COLOURS[method])


def others(axis: Any, result: Cell) -> None:
    """What else can be removed, against parameters: the best ranking of each size, filled where it was recovered."""
    for kind, marker in KINDS.items():
        label: str | None = {"widths": "channels, widths by layer"}.get(kind, kind)
        cells = [cell for cell in result.get(kind, []) if "parameters_after" in cell]
        if kind == "widths":
            cells = [cell for cell in cells if cell["allocation"] == "error"]
        for trained in (False, True):
            best: dict[float, float] = {}
            for cell in cells:
                if bool(cell.get("recovered")) is trained:
                    at = cell["parameters_after"] / 1e6
                    best[at] = min(best.get(at, math.inf), cell["perplexity"])
            if best:
                axis.plot(
                    list(best), list(best.values()), marker, markersize=5, color="#222222", linestyle="", label=label, zorder=3,
                    fillstyle="full" if trained or marker == "x" else "none",
                )  # fmt: skip
                label = None


def front(axis: Any, result: Cell, highest: float) -> None:
    """The Pareto front over everything that was measured, recovered or not: the least perplexity of so many parameters or fewer."""
    cells = [cell for part in ("channels", *KINDS) for cell in result.get(part, []) if "parameters_after" in cell]
    points = sorted((cell["parameters_after"] / 1e6, cell["perplexity"]) for cell in cells)
    points.append((cells[0]["parameters_before"] / 1e6, cells[0]["perplexity_before"]))
    at, least = [points[0][0]], [highest]
    for place, value in points:
        if value < least[-1]:
            at, least = [*at, place], [*least, value]
    axis.step(
        [*at, points[-1][0]],
        [*least, least[-1]],
        where="post",
        color="#222222",
        linewidth=0.8,
        zorder=1,
        label="Pareto front",
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with figure(11.0, 1.4 + 4.0 * len(arguments.files), *PRINTED) as (picture, _):
        picture.clf()
        axes = picture.subplots(len(arguments.files), 2, squeeze=False)
        for row, file in zip(axes, arguments.files, strict=True):
            draw_row(row, json.loads(file.read_text(encoding="utf-8")))
        look = {"loc": "outside upper left", "ncols": 6, "frameon": False, "fontsize": 10, "alignment": "left"}
        handles, labels = axes[0][0].get_legend_handles_labels()
        rankings, others_ = (
            [(h, n) for h, n in zip(handles, labels, strict=True) if (n in RANKINGS) is own] for own in (True, False)
        )
        told = "channels by ranking; solid: readers refitted, dotted: as they were, stars: recovered"
        picture.legend(*zip(*rankings, strict=True), title=told, **look)
        told = "what else is removed, by its best ranking; filled: recovered"
        picture.legend(*zip(*others_, strict=True), title=told, **(look | {"loc": "outside lower left", "ncols": 5}))
        save(picture, arguments.out)


def draw_row(row: Any, result: Cell) -> None:
    """Both panels of a model."""
    cells, shapes = result["channels"], result["latency"]["shapes"]
    whole = cells[0]["perplexity_before"]
    draw(row[0], cells, lambda cell: cell["parameters_after"] / 1e6)
    others(row[0], result)
    front(row[0], result, 10 * whole)
    draw(row[1], cells, lambda cell, of=shapes: of[f"ffn {cell['ratio']}"]["ms_per_token"])  # type: ignore[misc]
    row[0].set_xlabel(f"parameters of {result['model']}, millions")
    row[1].set_xlabel(
        f"measured ms a token of these shapes ({result['latency']['weights']}, {result['latency']['threads']} threads)"
    )
    above = sum(cell["perplexity"] > whole * HIGHEST for cell in cells)
    for axis, at in ((row[0], cells[0]["parameters_before"] / 1e6), (row[1], shapes["whole"]["ms_per_token"])):
        axis.plot([at], [whole], ".", color="#0f172a", markersize=9)
        axis.axhline(whole, color="#888888", linewidth=0.6)
        axis.set_yscale("log")
        ticks = [round(whole * times, 1) for times in (1, 1.1, 1.2, 1.5, 2, 3)]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_ylim(whole * 0.98, whole * HIGHEST)
        axis.grid(color=PRINTED[1], linewidth=0.8)
        if above:
            axis.set_title(f"{above} worse cells of channels lie above", loc="right", fontsize=9)
    row[0].set_ylabel("perplexity of held-out text")


if __name__ == "__main__":
    main()
