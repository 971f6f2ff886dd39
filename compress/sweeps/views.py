"""Plot and standalone page of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from compress.core.files import write_text
from compress.report import elements
from compress.report.charts import FAINT, INK, PRINTED, color, figure, log_where_wide, save, svg
from compress.report.plots import label_axes
from compress.sweeps.labels import sentence, word
from compress.sweeps.metrics import METRICS, Metric
from compress.sweeps.models import Sweep
from compress.sweeps.pareto import pareto_front
from compress.sweeps.results import note, ranked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SOFT = "#94a3b8"
_LABELLED = 14  # up to so many trials all have a label; beyond, only those on the front
_WORDS = 3  # keys whose values make a label; with more it is the trial's number


def panels(result: dict[str, Any]) -> list[tuple[Metric, Metric]]:
    """(x, y) of each panel: the first objective over each other one. One objective alone is drawn over the size."""
    names = [objective["name"] for objective in result["objectives"]]
    if len(names) == 1:
        measured = {name for trial in result["trials"] for name in trial["metrics"]}
        other = "size" if names[0] != "size" else next((n for n in METRICS if n in measured and n != "size"), None)
        names = [names[0], other] if other and names[0] != "size" else [other, "size"] if other else []
    pairs = [(METRICS[name], METRICS[names[0]]) for name in names[1:]]
    return [(x, y) for x, y in pairs if _points(result, x, y)]


@contextmanager
def _plot(result: dict[str, Any], title: str, ink: str, faint: str, ground: str) -> Iterator[Figure]:
    """All panels, of which there is one at least."""
    pairs = panels(result)
    keys = list(result["keys"].values())
    labels = ", ".join(keys) if len(keys) <= _WORDS else "number of the trial"
    with figure(8.0 if len(pairs) == 1 else 6.2 * len(pairs), 4.8, ink, faint, ground) as (drawn, _):
        drawn.clf()
        every = drawn.subplots(1, len(pairs), squeeze=False)[0]
        every[0].set_title(title, loc="left", fontsize=12, fontweight="bold")
        for axes, (x, y) in zip(every, pairs, strict=True):
            _panel(axes, result, x, y, ink=ink, faint=faint)
            axes.set_title(f"labels: {labels}", loc="right", fontsize=8, color=ink)
        yield drawn


def _points(result: dict[str, Any], x: Metric, y: Metric) -> list[dict[str, Any]]:
    return [trial for trial in result["trials"] if None not in map(trial["metrics"].get, (x.name, y.name))]


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
        # Up to the next point, the value of the one before it is reached too; where more is better, the other way round.
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
    named = trials if len(trials) <= _LABELLED else [trial for trial in trials if trial["pareto"]]
    labels = [(*at(trial["metrics"]), _label(result, trial), ink if trial["pareto"] else SOFT) for trial in named]
    label_axes(axes, x.label, y.label, faint, labels)


def _reference(axes: Axes, source: dict[str, Any], x: Metric, y: Metric, across: list[float]) -> None:
    """The original model: a star, or a line with its numbers in the legend where a star would leave the trials no room."""
    upright, along = source.get(y.name), source.get(x.name)
    if upright is None:
        return
    name = "the original model"
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
    """Write pareto.svg, pareto.png (where a trial can be drawn) and report.html into the sweep's directory."""
    written = [path / "pareto.svg", path / "pareto.png"] if panels(result) else []
    if written:
        with _plot(result, result["name"], *PRINTED) as drawn:
            for file in written:
                save(drawn, file)
    write_text(path / "report.html", _page(result, sweep))
    return [*written, path / "report.html"]


def columns(result: dict[str, Any]) -> list[str]:
    """Names of a table's metrics: the objectives, then others of quality, size and speed."""
    measured = {name for trial in result["trials"] for name in trial["metrics"]}
    names = [objective["name"] for objective in result["objectives"]]
    more = ("perplexity", "kl", "cosine", "size", "decode_speed")
    return [name for name in dict.fromkeys([*names, *more]) if name in measured]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table as text: trial, values, metrics, whether it is on the front, a note; the original model comes first."""
    names = columns(result)

    def numbers(metrics: dict[str, Any]) -> list[str]:
        return [METRICS[name].show(metrics.get(name)) for name in names]

    table_rows = [["source", *("" for _ in result["keys"]), *numbers(result["source"]), "", ""]]
    for trial in ranked(result):
        values = [word(trial["values"].get(key)) for key in result["keys"]]
        front = "*" if trial["pareto"] else ""
        table_rows.append([str(trial["number"]), *values, *numbers(trial["metrics"]), front, note(trial)])
    return table_rows if result["source"] else table_rows[1:]


def _page(result: dict[str, Any], sweep: Sweep) -> str:
    counts = result["counts"]
    missing = ", ".join(f"{counts[status]} {status}" for status in ("failed", "refused") if counts[status])
    better = "no trial is better in one objective and as good in the others"
    numbers = [
        (str(len(result["trials"])), "trials", missing or "all finished"),
        (str(len(result["pareto"])), "on the Pareto front", better),
    ]
    chosen = next((trial for trial in result["trials"] if trial["number"] == result["best"]), None)
    if chosen is not None:
        first = result["objectives"][0]["name"]
        values = f"trial {chosen['number']}: {sentence(chosen['values'])}"
        numbers.append((METRICS[first].show(chosen["metrics"][first]), f"the best {first}", values))
    keys, names = list(result["keys"].values()), columns(result)
    heads = ["trial>", *keys, *(f"{name}>" for name in names), "front", "note"]
    cells: list[list[elements.Cell]] = [[*row[:-2], (row[-2], "ok"), (row[-1], "notes")] for row in rows(result)]
    chart = ""
    if panels(result):
        with _plot(result, "", INK, FAINT, "none") as drawn:
            chart = svg(drawn, "pareto", "trials of the sweep and their Pareto front")
    written = yaml.safe_dump(sweep.resolved(), sort_keys=False, allow_unicode=True)
    body = (
        elements.note(sweep.file.description) + elements.cards(numbers)
        + (elements.section("Quality against cost", chart) if chart else "")
        + (elements.note(f"Quality is measured on {result['text']}.") if result["text"] else "")
        + elements.section("Trials", elements.folded(elements.table(heads, cells), len(cells), "trials"))
        + elements.section("Sweep", f"<pre>{escape(written)}</pre>")
    )  # fmt: skip
    footer = f"Written by compress {escape(result['compress_version'])} from sweep.json."
    return elements.document(f"{result['name']}: a sweep", result["name"], body, footer)
