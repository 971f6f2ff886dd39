"""What a sweep writes to look at: the plot, and a page that stands alone."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import yaml

from compress.pipeline.files import write_text
from compress.report.elements import folded, section, table
from compress.report.style import CSS
from compress.sweeps.labels import word
from compress.sweeps.metrics import METRICS
from compress.sweeps.models import Sweep
from compress.sweeps.plot import plot_for_page, write_plot
from compress.sweeps.results import note, ranked


def write_views(result: dict[str, Any], sweep: Sweep, path: Path) -> list[Path]:
    """Write pareto.svg, pareto.png and report.html into the sweep's directory."""
    written = write_plot(result, path)
    write_text(path / "report.html", _page(result, sweep))
    return [*written, path / "report.html"]


def columns(result: dict[str, Any]) -> list[str]:
    """Names of the metrics that a table shows: the objectives, then what else says how good and how large a trial is."""
    measured = {name for trial in result["trials"] for name in trial["metrics"]}
    names = [objective["name"] for objective in result["objectives"]]
    more = ("perplexity", "kl", "cosine", "size", "decode_speed")
    return [name for name in dict.fromkeys([*names, *more]) if name in measured]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table as text: trial, its values, metrics, whether it is on the front, a note; the model that is compressed comes first."""
    names = columns(result)
    table_rows = []
    if result["source"]:
        numbers = [METRICS[name].show(result["source"].get(name)) for name in names]
        table_rows.append(["source", *("" for _ in result["keys"]), *numbers, "", ""])
    for trial in ranked(result):
        values = [word(trial["values"].get(key)) for key in result["keys"]]
        numbers = [METRICS[name].show(trial["metrics"].get(name)) for name in names]
        table_rows.append([str(trial["number"]), *values, *numbers, "*" if trial["pareto"] else "", note(trial)])
    return table_rows


def _page(result: dict[str, Any], sweep: Sweep) -> str:
    counts = result["counts"]
    missing = ", ".join(f"{counts[status]} {status}" for status in ("failed", "refused") if counts[status])
    cards = [
        (str(len(result["trials"])), "trials", missing or "all finished"),
        (
            str(len(result["pareto"])),
            "on the Pareto front",
            "no other is at least as good in everything and better in something",
        ),
    ]
    chosen = next((trial for trial in result["trials"] if trial["number"] == result["best"]), None)
    if chosen is not None:
        first = result["objectives"][0]["name"]
        values = " ".join(f"{result['keys'][key]}={word(value)}" for key, value in chosen["values"].items())
        cards.append(
            (METRICS[first].show(chosen["metrics"][first]), f"the best {first}", f"trial {chosen['number']}: {values}")
        )
    numbers = "".join(f"<div><b>{escape(a)}</b>{escape(b)}<small>{escape(c)}</small></div>" for a, b, c in cards)
    keys, names = list(result["keys"].values()), columns(result)
    heads = ["trial>", *keys, *(f"{name}>" for name in names), "front", "note"]
    classes = ["right", *("" for _ in keys), *("right" for _ in names), "ok", "notes"]
    cells = [list(zip(row, classes, strict=True)) for row in rows(result)]
    chart = plot_for_page(result)
    written = yaml.safe_dump(sweep.resolved(), sort_keys=False, allow_unicode=True)
    body = "".join(
        (
            section("Quality against cost", chart) if chart else "",
            section("Trials", folded(table(heads, cells), len(cells), "trials")),
            section("Sweep", f"<pre>{escape(written)}</pre>"),
        )
    )
    title, description = escape(result["name"]), escape(sweep.file.description)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: a sweep</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        f'<p class="soft">{description}</p><div class="numbers">{numbers}</div>\n{body}\n'
        f"<footer>Written by compress {escape(result['compress_version'])} from sweep.json.</footer>\n</main>\n</body>\n</html>\n"
    )
