"""Command `compress report`: the page of one artifact, or a table and plot of several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import typer

from compress.commands.options import JSON
from compress.commands.output import finish, print_table, stdout_reserved
from compress.core.units import size
from runtime.errors import RequestError


def report(
    artifacts: list[Path] = typer.Argument(..., metavar="ARTIFACT", help="One artifact, or several to compare."),
    output: Path | None = typer.Option(None, "--output", "-o", help="File to write (default: ARTIFACT/report.html)."),
    plot: Path | None = typer.Option(None, "--plot", help="Plot size against perplexity: a .svg, .png or .pdf file."),
    as_json: bool = JSON,
) -> None:
    """Write the report page of an artifact, or compare several in a table and a plot.

    The page is self-contained. Everything in it comes from the artifact; nothing is measured again.

    \b
    Examples:
      compress report out/llama_w4_sparse
      compress report out/llama_w4 out/llama_w8a8 out/llama_w4_sparse --plot tradeoff.svg
    """
    several = len(artifacts) > 1
    if output is not None and (several or plot is not None):
        raise RequestError("--output is for the page of one artifact; use --plot to draw a comparison")
    written: list[Path] = []
    rows: list[dict[str, Any]] = []
    with stdout_reserved(as_json):
        from compress.report import comparison, plot_tradeoff, write_report

        if several or plot is not None:
            rows = comparison(artifacts)
            if plot is not None:
                written = plot_tradeoff(rows, plot)
        else:
            written = [write_report(artifacts[0], output)]
    result: dict[str, Any] = {"written": [str(path) for path in written]}
    finish(result | ({"artifacts": rows} if rows else {}), as_json, _show)


def _show(result: dict[str, Any]) -> None:
    if "artifacts" in result:
        _show_comparison(result["artifacts"])
    for path in result["written"]:
        print(f"Written to {path}.")


def _show_comparison(rows: list[dict[str, Any]]) -> None:
    original = next((row for row in rows if row.get("reference")), None)
    cells = []
    for row in rows:
        bits = row.get("bits_per_weight")
        known = isinstance(row["perplexity"], float) and math.isfinite(row["perplexity"])
        cells.append(
            (
                row["label"], row["method"], size(row["bytes"]), f"{bits:.2f}" if bits else "",
                f"{row['perplexity']:.4g}" if known else "not measured",
                f"{row['perplexity'] / original['perplexity'] - 1:+.1%}" if known and original and row is not original else "",
            )
        )  # fmt: skip
    columns = ("artifact", "methods", "size", "bits per weight", "perplexity", "change")
    print_table(columns, cells, right=(2, 3, 4, 5))
