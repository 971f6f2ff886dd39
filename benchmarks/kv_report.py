"""What `kv_quality.py` found: tables, the plot, and whether we are ahead of kvpress.

    python benchmarks/kv_report.py [--result FILE] [--plot docs/images/kv_quality.svg] [--report docs/results/kv_quality.md]
                                   [--summary docs/results/kv_cache.md]

Each kind of job (a task at a length) has a table of its own. Numbers are means over seeds; noise is the standard error of the difference
over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.report.charts import PRINTED, figure, save
from compress.report.plots import place_labels

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "kv_quality.json"
DOCS = HERE.parent / "docs"
MARKS = ("<!-- kv quality: python benchmarks/kv_report.py -->", "<!-- /kv quality -->")


@dataclass(frozen=True)
class Panel:
    """One kind of job.

    Attributes:
        job: its name in cells.
        title: of its tables.
        kind: "accuracy", in percent, or "perplexity", of which less is better.
        drawn: in the picture.
    """

    job: str
    title: str
    kind: str
    drawn: bool = False

    @property
    def better(self) -> bool:
        """Whether more is better."""
        return self.kind == "accuracy"

    @property
    def decodes(self) -> bool:
        """Whether tokens leave while decoding: budgets are tokens of the whole text then, and bytes are those at its end."""
        return self.job.startswith("steps")


def panels(result: dict[str, Any]) -> list[Panel]:
    """Those that there are cells of."""
    found = []
    for job in sorted({cell["job"] for cell in result["cells"]}, key=lambda j: (j.split("-")[0], int(j.split("-")[1]))):
        task, length = job.split("-")[:2]
        drawn = length == "2048"
        if task == "needle":
            found.append(Panel(job, f"needles in {length} tokens, asked for later, right (%)", "accuracy", drawn))
        elif task == "recall":
            found.append(
                Panel(job, f"one of the pairs in {length} tokens, question in the prompt, right (%)", "accuracy", drawn)
            )
        elif task == "text":
            found.append(
                Panel(
                    job,
                    f"text of {length} tokens, the last quarter after the cut, perplexity (less is better)",
                    "perplexity",
                    True,
                )
            )
        else:
            found.append(Panel(job, f"text of {length} tokens, decoded one by one, perplexity", "perplexity", True))
    return found


def number(cells: list[dict[str, Any]], kind: str) -> float:
    """Accuracy in percent, or perplexity, of cells together: every job counts the same."""
    if kind == "accuracy":
        return 100 * statistics.fmean(cell["correct"] / cell["asked"] for cell in cells)
    return math.exp(statistics.fmean(cell["nll"] for cell in cells))


def points(result: dict[str, Any], panel: Panel) -> list[dict[str, Any]]:
    """One for each tool, method and budget that worked: share of the bytes, the number, the same seed by seed, what steps read."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        if cell["job"] == panel.job:
            groups.setdefault((cell["tool"], cell["method"], cell["budget"]), []).append(cell)
    seeds = {cell["seed"] for cells in groups.values() for cell in cells}
    found = []
    for (tool, method, budget), cells in groups.items():
        if any("error" in cell for cell in cells) or {cell["seed"] for cell in cells} != seeds:
            continue
        by_seed = {cell["seed"]: number([cell], panel.kind) for cell in cells}
        reads = [cell["reads"] for cell in cells if "reads" in cell]
        found.append(
            {
                "tool": tool, "method": method, "budget": budget, "bytes": statistics.fmean(c["bytes"] for c in cells),
                "value": number(cells, panel.kind), "by_seed": by_seed, "peers": cells[0].get("peers", []),
                "reads": statistics.fmean(reads) if reads else None,
            }
        )  # fmt: skip
    return found


def fits(point: dict[str, Any], budget: float) -> bool:
    """Whether a point counts at a budget: at the same nominal one, or of one size that is no larger."""
    return bool(point["budget"] == budget) if point["budget"] is not None else point["bytes"] <= budget


def holds(point: dict[str, Any], budget: float, panel: Panel) -> bool:
    """Whether a claim may rest on it: its bytes, as allocated, are within 1 % of the budget. (While decoding: its tokens.)"""
    if point["method"] in ("full", "full cache") or point["reads"] is not None:
        return False
    return fits(point, budget) if panel.decodes else bool(point["bytes"] <= budget * 1.01)


def pairs(found: list[dict[str, Any]], better: bool) -> list[dict[str, Any]]:
    """Each of our methods beside kvpress's own version of it, with the noise of the difference."""
    rows = []
    for mine in found:
        for name in mine["peers"] if mine["tool"] == "compress" else []:
            theirs = next(
                (p for p in found if p["tool"] == "kvpress" and p["method"] == name and p["budget"] == mine["budget"]),
                None,
            )
            if theirs is None:
                continue
            differences = [mine["by_seed"][s] - theirs["by_seed"][s] for s in mine["by_seed"] if s in theirs["by_seed"]]
            gain = statistics.fmean(differences) * (1 if better else -1)
            noise = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
            rows.append(
                {"method": mine["method"], "peer": name, "budget": mine["budget"], "gain": gain, "noise": noise}
            )
    return rows


def at(row: dict[str, Any]) -> str:
    """The budget in words; none of what has one size."""
    return "" if row["budget"] is None else f" at {100 * row['budget']:g} %"


def behind(row: dict[str, Any]) -> bool:
    """Whether ours is below theirs by more than the noise."""
    return bool(row["gain"] < -2 * row["noise"] - 0.005)


def best(found: list[dict[str, Any]], tool: str, budget: float, panel: Panel) -> dict[str, Any] | None:
    """The best point of a tool at a budget."""
    there = [p for p in found if p["tool"] == tool and holds(p, budget, panel)]
    sign = 1 if panel.better else -1
    return max(there, key=lambda p: (sign * p["value"], -p["bytes"])) if there else None


def least(found: list[dict[str, Any]], tool: str, panel: Panel) -> dict[str, Any] | None:
    """The point of a tool with the fewest bytes that is as good as a full cache, within 1 %."""
    whole = next((p["value"] for p in found if p["method"] == "full cache"), None)
    if whole is None or panel.decodes:
        return None
    good = [
        p for p in found
        if p["tool"] == tool and p["reads"] is None and p["method"] not in ("full", "full cache")
        and (p["value"] >= 0.99 * whole if panel.better else p["value"] <= 1.01 * whole)
    ]  # fmt: skip
    return min(good, key=lambda p: p["bytes"]) if good else None


def budgets_of(result: dict[str, Any]) -> list[float]:
    """All of them, the largest first."""
    return sorted({c["budget"] for c in result["cells"] if c["budget"] and c["tool"] == "compress"}, reverse=True)


def text(result: dict[str, Any]) -> str:
    """Every table, in Markdown."""
    budgets = budgets_of(result)
    header = ["| | " + " | ".join(f"{100 * b:g} %" for b in budgets) + " |", "|---|" + "---:|" * len(budgets)]
    lines = []
    for panel in panels(result):
        found = points(result, panel)
        lines += [f"## {panel.title}", "", *header]
        for tool, method in sorted({(p["tool"], p["method"]) for p in found if p["reads"] is None}):
            mine = [p for p in found if (p["tool"], p["method"]) == (tool, method)]
            cells = []
            for budget in budgets:
                chosen = [p for p in mine if fits(p, budget) or p["method"].startswith("full")]
                cells.append(f"{chosen[0]['value']:.2f}" if chosen else "")
            size = f" ({100 * mine[0]['bytes']:.3g} % of the bytes)" if mine[0]["budget"] is None else ""
            if any(cells) or size:
                lines.append(f"| {tool}: {method}{size} | " + " | ".join(cells) + " |")
        lines += ["", *_selections(found, budgets, panel)]
        for budget in budgets:
            ours, theirs = best(found, "compress", budget, panel), best(found, "kvpress", budget, panel)
            if ours and theirs:
                lines.append(
                    f"- {100 * budget:g} %: ours {ours['value']:.2f} ({ours['method']}, {100 * ours['bytes']:.3g} % of the bytes), "
                    f"kvpress {theirs['value']:.2f} ({theirs['method']})"
                )
        for row in pairs(found, panel.better):
            mark = "  <-- BEHIND" if behind(row) else ""
            lines.append(
                f"- {row['method']} against {row['peer']}{at(row)}: {row['gain']:+.2f} +- {row['noise']:.2f}{mark}"
            )
        lines.append("")
    return "\n".join(lines)


def _selections(found: list[dict[str, Any]], budgets: list[float], panel: Panel) -> list[str]:
    """What steps read of a cache that is kept whole: the share, and the number."""
    names = sorted({p["method"] for p in found if p["reads"] is not None})
    if not names:
        return []
    lines = ["Cache kept, reads cut (share of the tokens held that steps read, first layers and all):", ""]
    lines += ["| wanted | " + " | ".join(f"{100 * b:g} %" for b in budgets) + " |", "|---|" + "---:|" * len(budgets)]
    for name in names:
        mine = {p["budget"]: p for p in found if p["method"] == name}
        cells = [f"{mine[b]['value']:.2f} ({100 * mine[b]['reads']:.0f} %)" if b in mine else "" for b in budgets]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def summary(result: dict[str, Any]) -> str:
    """The summary table: the best of each tool at each budget, and how far our versions of their methods are from theirs."""
    budgets = budgets_of(result)
    head = ["compress / kvpress", *(f"{100 * b:g} %" for b in budgets), "smallest as good as the full cache"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * len(budgets) + "|---|"]
    compared = []
    for panel in panels(result):
        found = points(result, panel)
        digits = 1 if panel.better else 2
        cells = [panel.title]
        for budget in budgets:
            two = [best(found, tool, budget, panel) for tool in ("compress", "kvpress")]
            cells.append(" / ".join("" if one is None else f"{one['value']:.{digits}f}" for one in two))
        few = [least(found, tool, panel) for tool in ("compress", "kvpress")]
        cells.append(" / ".join("-" if one is None else f"{100 * one['bytes']:.3g} % ({one['method']})" for one in few))
        if panel.decodes:
            cells[-1] = ""
        lines.append("| " + " | ".join(cells) + " |")
        compared += pairs(found, panel.better)
    lost = [row for row in compared if behind(row)]
    named = "; ".join(f"{r['method']}{at(r)}: {r['gain']:+.2f} +- {r['noise']:.2f}" for r in lost)
    lines += [
        "",
        f"Our versions of kvpress's methods beside theirs at equal shares of tokens: {len(compared)} cells, behind by more than the noise "
        f"in {len(lost)}{': ' + named if named else ''}.",
    ]
    return "\n".join(lines)


def front(found: list[dict[str, Any]], tool: str, better: bool) -> list[dict[str, Any]]:
    """Points of a tool that no smaller one of it equals, the smallest first."""
    kept: list[dict[str, Any]] = []
    mine = [p for p in found if p["tool"] == tool and p["method"] not in ("full", "full cache")]
    for point in sorted(mine, key=lambda p: (p["bytes"], -p["value"] if better else p["value"])):
        if not kept or (point["value"] > kept[-1]["value"] if better else point["value"] < kept[-1]["value"]):
            kept.append(point)
    return kept


def draw(result: dict[str, Any], file: Path) -> None:
    """Quality against bytes: every method and budget a point, the best of each tool a line; numbers name our best ones below each panel."""
    drawn = [panel for panel in panels(result) if panel.drawn]
    columns = -(-len(drawn) // 2)
    with figure(6.5 * columns, 12.5, *PRINTED) as (picture, _):
        picture.clf()
        axes = list(picture.subplots(2, columns, squeeze=False).flat)
        for axis, panel in zip(axes, drawn, strict=False):
            _draw_panel(axis, [p for p in points(result, panel) if p["reads"] is None], panel)
        picture.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False, fontsize=11
        )
        for axis, panel in zip(axes, drawn, strict=False):  # once all have their places
            _name_best(axis, front([p for p in points(result, panel) if p["reads"] is None], "compress", panel.better))
        save(picture, file)


def _draw_panel(axis: Any, found: list[dict[str, Any]], panel: Panel) -> None:
    for tool, colour, name in (("kvpress", "#94a3b8", "kvpress"), ("compress", "#2563eb", "ours")):
        mine = [p for p in found if p["tool"] == tool and p["method"] not in ("full", "full cache")]
        places = [100 * p["bytes"] for p in mine], [p["value"] for p in mine]
        axis.plot(*places, ".", color=colour, ms=5, alpha=0.5, label=f"{name}, all")
        best_ones = front(found, tool, panel.better)
        line = [(100 * p["bytes"], p["value"]) for p in best_ones]
        line.append((100.0, line[-1][1]))
        axis.step(*zip(*line, strict=True), where="post", color=colour, lw=1.8, label=f"{name}, best for its bytes")
    whole = [p["value"] for p in found if p["method"] == "full cache"]
    axis.axhline(whole[0], color="#0f172a", lw=0.9, ls=":", label="full cache")
    axis.set_title(panel.title.replace(", perplexity", ",\nperplexity").replace(", right", ",\nright"), fontsize=11)
    axis.set_xlabel("bytes of the cache, % of a plain one" + (" of the whole text" if panel.decodes else ""))
    axis.set_xscale("log", base=2)
    axis.set_xticks([1.5625, 3.125, 6.25, 12.5, 25, 50, 100], ["1.6", "3.1", "6.25", "12.5", "25", "50", "100"])
    axis.set_xlim(min(2.5, *(95 * p["bytes"] for p in found)), 110)
    axis.grid(color=PRINTED[1], linewidth=0.8)
    if not panel.better:
        axis.set_ylim(whole[0] * 0.98, whole[0] * 1.35)


def _name_best(axis: Any, best_ones: list[dict[str, Any]]) -> None:
    """A number at each point, and below the panel the method that it stands for; names beside the points would cover each other."""
    names = list(dict.fromkeys(point["method"] for point in best_ones))
    key = "\n".join(f"{number}  {name}" for number, name in enumerate(names, 1))
    axis.annotate(key, (0, 0), (0, -42), "axes fraction", "offset points", va="top", fontsize=10, linespacing=1.35)
    marks = [(100 * p["bytes"], p["value"], str(names.index(p["method"]) + 1), "#1e3a8a") for p in best_ones]
    place_labels(axis, marks, size=11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--plot", type=Path, default=DOCS / "images" / "kv_quality.svg")
    parser.add_argument("--report", type=Path, default=DOCS / "results" / "kv_quality.md", help="every table")
    parser.add_argument("--summary", type=Path, help="page whose table between the marks is rewritten")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    intro = (
        "# Quality of compressed caches\n\nWritten by `benchmarks/kv_report.py`; measured by `benchmarks/kv_quality.py`, beside "
        f"kvpress {result['kvpress'].get('kvpress', '')}, three seeds.\n\n"
    )
    arguments.report.write_text(intro + text(result))
    print(summary(result))
    draw(result, arguments.plot)
    if arguments.summary:
        before, rest = arguments.summary.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        table = summary(result)
        arguments.summary.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
