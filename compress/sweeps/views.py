"""Plot and standalone page of a sweep."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from compress.core.files import write_text
from compress.report.charts import color, figure, log_where_wide, svg
from compress.report.elements import CSS, folded, section, table
from compress.report.plots import place_labels
from compress.sweeps.labels import word
from compress.sweeps.metrics import METRICS, Metric
from compress.sweeps.models import Sweep
from compress.sweeps.pareto import pareto_front
from compress.sweeps.results import note, ranked

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The picture of a sweep: every trial, the Pareto front as a step line, and the model that they were made of.

SOFT = "#94a3b8"
_LABELLED = 14  # so many trials all have a label; of more, only those on the front
_WORDS = 3  # keys whose values make a label; with more it is the trial's number


def panels(result: dict[str, Any]) -> list[tuple[Metric, Metric]]:
    """What is drawn over what, (x, y): the first objective over each other one. One objective alone is drawn over the size."""
    names = [objective["name"] for objective in result["objectives"]]
    if len(names) == 1:
        measured = {name for trial in result["trials"] for name in trial["metrics"]}
        other = "size" if names[0] != "size" else next((n for n in METRICS if n in measured and n != "size"), None)
        names = [names[0], other] if other and names[0] != "size" else [other, "size"] if other else []
    pairs = [(METRICS[name], METRICS[names[0]]) for name in names[1:]]
    return [(x, y) for x, y in pairs if _points(result, x, y)]


def write_plot(result: dict[str, Any], path: Path) -> list[Path]:
    """Write pareto.svg and pareto.png into `path`; nothing where no trial can be drawn."""
    written = []
    pairs = panels(result)
    if not pairs:
        return []
    with figure(_width(pairs), 4.8, ink="#334155", faint="#e2e8f0", ground="white") as (drawn, _):
        _draw(drawn, result, pairs, ink="#334155", faint="#e2e8f0")
        for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
            file = path / f"pareto{suffix}"
            drawn.savefig(file, dpi=160, metadata=metadata)
            written.append(file)
    return written


def plot_for_page(result: dict[str, Any]) -> str:
    """The same as an `<svg>` element in the colours of a page; empty where no trial can be drawn."""
    from compress.report.charts import FAINT, INK

    pairs = panels(result)
    if not pairs:
        return ""
    with figure(_width(pairs), 4.8) as (drawn, _):
        _draw(drawn, result, pairs, ink=INK, faint=FAINT, title=False)
        return svg(drawn, "pareto", "trials of the sweep and their Pareto front")


def _width(pairs: list[tuple[Metric, Metric]]) -> float:
    return 8.0 if len(pairs) == 1 else 6.2 * len(pairs)


def _draw(
    drawn: Any, result: dict[str, Any], pairs: list[tuple[Metric, Metric]], ink: str, faint: str, title: bool = True
) -> None:
    drawn.clf()
    keys = list(result["keys"].values())
    labels = ", ".join(keys) if len(keys) <= _WORDS else "number of the trial"
    for number, axes in enumerate(drawn.subplots(1, len(pairs), squeeze=False)[0]):
        _panel(axes, result, *pairs[number], ink=ink, faint=faint)
        if number == 0 and title:
            axes.set_title(result["name"], loc="left", fontsize=12, fontweight="bold")
        axes.set_title(f"labels: {labels}", loc="right", fontsize=8, color=ink)


def _points(result: dict[str, Any], x: Metric, y: Metric) -> list[dict[str, Any]]:
    return [
        t for t in result["trials"] if t["metrics"].get(x.name) is not None and t["metrics"].get(y.name) is not None
    ]


def _panel(axes: Axes, result: dict[str, Any], x: Metric, y: Metric, ink: str, faint: str) -> None:
    def at(metrics: dict[str, float]) -> tuple[float, float]:
        return metrics[x.name] / x.axis, metrics[y.name] / y.axis

    trials = _points(result, x, y)
    counting = [trial for trial in trials if not trial["broken"]]
    kinds: tuple[tuple[str, list[dict[str, Any]], dict[str, Any]], ...] = (
        ("on the Pareto front", [t for t in counting if t["pareto"]], {"color": color(0), "s": 52, "zorder": 4}),
        ("another is better", [t for t in counting if not t["pareto"]], {"color": SOFT, "s": 34, "zorder": 3}),
        ("beyond a limit", [t for t in trials if t["broken"]], {"color": SOFT, "s": 34, "marker": "x", "zorder": 3}),
    )
    order = pareto_front([at(trial["metrics"]) for trial in counting], [x.better, y.better])
    steps = sorted(at(counting[index]["metrics"]) for index in order)
    if len(steps) > 1:
        # Up to the next point, what the one before it has reached is reached too; where more is better, the other way round.
        style = "steps-post" if x.better == "min" else "steps-pre"
        axes.plot(*zip(*steps, strict=True), drawstyle=style, color=color(0), linewidth=1.4, alpha=0.7, zorder=2)
    for name, those, look in kinds:
        if those:
            places = [at(trial["metrics"]) for trial in those]
            axes.scatter(*zip(*places, strict=True), label=name, linewidths=1.4, **look)
    values = [at(trial["metrics"])[1] for trial in trials]
    upright = result["source"].get(y.name)
    log_where_wide(axes, values if not upright else [*values, upright / y.axis], times=4.0)
    _reference(axes, result["source"], x, y, [at(trial["metrics"])[0] for trial in trials])
    axes.margins(x=0.1, y=0.12)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    axes.grid(color=faint, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)
    named = trials if len(trials) <= _LABELLED else [trial for trial in trials if trial["pareto"]]
    place_labels(
        axes, [(*at(trial["metrics"]), _label(result, trial), ink if trial["pareto"] else SOFT) for trial in named]
    )


def _reference(axes: Axes, source: dict[str, Any], x: Metric, y: Metric, across: list[float]) -> None:
    """The model that is compressed: a star, or, where the trials would have no room beside it, a line and its numbers in the legend."""
    upright, along = source.get(y.name), source.get(x.name)
    if upright is None:
        return
    name = "the model itself"
    look: dict[str, Any] = {"color": color(2), "linestyle": "--", "linewidth": 1.2, "zorder": 1}
    low, high = min(across), max(across)
    if axes.get_yscale() == "log" and upright <= 0:  # a divergence from itself has no place there
        axes.plot([], [], " ", label=name if along is None else f"{name}: {x.show(along)}")
        return
    near = along is not None and max(high, along / x.axis) - min(low, along / x.axis) <= 2 * (high - low)
    if along is not None and near:
        axes.scatter(along / x.axis, upright / y.axis, marker="*", s=130, color=color(2), zorder=4, label=name)
    elif along is not None:
        name = f"{name}: {y.show(upright)} at {x.show(along)}"
    axes.axhline(upright / y.axis, label=None if near else name, **look)


def _label(result: dict[str, Any], trial: dict[str, Any]) -> str:
    if len(result["keys"]) > _WORDS:
        return f"#{trial['number']}"
    text = ", ".join(word(trial["values"].get(key)) for key in result["keys"])
    return text if len(text) <= 36 else f"#{trial['number']}"


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
