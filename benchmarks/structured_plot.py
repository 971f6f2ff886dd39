#!/usr/bin/env python
"""What benchmarks/structured.py measured, drawn: perplexity against parameters and against measured latency, a row a model.

python benchmarks/structured_plot.py bundled.json gpt2.json --out docs/structure.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from structured import RANKINGS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Cell = dict[str, Any]
COLOURS = dict(zip(RANKINGS, ("#888888", "#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#1f77b4"), strict=True))


def draw(axis: Any, cells: list[Cell], along: Callable[[Cell], float]) -> None:
    """Dotted: as the readers were. Lines: refitted. Stars: recovered as well."""
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figure, axes = plt.subplots(len(arguments.files), 2, figsize=(10, 3.6 * len(arguments.files)), squeeze=False)
    for row, file in zip(axes, arguments.files, strict=True):
        result = json.loads(file.read_text(encoding="utf-8"))
        cells, shapes = result["channels"], result["latency"]["shapes"]
        draw(row[0], cells, lambda cell: cell["parameters_after"] / 1e6)
        draw(row[1], cells, lambda cell, of=shapes: of[f"ffn {cell['ratio']}"]["ms_per_token"])  # type: ignore[misc]
        row[0].set_xlabel(f"parameters of {result['model']}, millions")
        row[1].set_xlabel(
            f"measured milliseconds a token, {result['latency']['weights']}, {result['latency']['threads']} threads"
        )
        whole = cells[0]["perplexity_before"]
        for axis, at in ((row[0], cells[0]["parameters_before"] / 1e6), (row[1], shapes["whole"]["ms_per_token"])):
            axis.plot([at], [whole], "k.", markersize=8)
            axis.axhline(whole, color="#888888", linewidth=0.6)
            axis.set_yscale("log")
            ticks = [round(whole * times, 1) for times in (1, 1.1, 1.2, 1.5, 2, 3)]
            axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
            axis.set_ylim(whole * 0.98, whole * 3.2)
        row[0].set_ylabel("perplexity of held-out text")
    axes[0][1].legend(
        fontsize=8, title="solid: readers refitted\ndotted: as they were\nstars: recovered", title_fontsize=8
    )
    figure.tight_layout()
    figure.savefig(arguments.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
