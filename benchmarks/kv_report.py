"""What `kv_quality.py` found: a table, the picture for the README, and whether we are ahead of kvpress.

    python benchmarks/kv_report.py [--result FILE] [--plot docs/kv_quality.svg]

Cells are means over jobs (tasks, lengths) and over seeds; noise is the standard error of the difference over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "kv_quality.json"
PLOT = HERE.parent / "docs" / "kv_quality.svg"
MARKS = ("<!-- kv quality: python benchmarks/kv_report.py --readme README.md -->", "<!-- /kv quality -->")
#: Kinds of jobs that are read together: title, which jobs, what a cell's number is, whether more of it is better.
PANELS: tuple[tuple[str, Callable[[str], bool], str, bool], ...] = (
    ("needles asked for later, right (%)", lambda j: j.endswith("later"), "accuracy", True),
    ("one of 409 pairs, question in the prompt, right (%)", lambda j: j.endswith("known"), "accuracy", True),
    ("text, perplexity", lambda j: j.startswith("text"), "perplexity", False),
)  # fmt: skip


def number(cells: list[dict[str, Any]], kind: str) -> float:
    """Accuracy in percent, or perplexity, of cells together: every job counts the same."""
    if kind == "accuracy":
        return 100 * statistics.fmean(cell["correct"] / cell["asked"] for cell in cells)
    return math.exp(statistics.fmean(cell["nll"] for cell in cells))


def points(result: dict[str, Any], belongs: Callable[[str], bool], kind: str) -> list[dict[str, Any]]:
    """One for each tool, method and budget that worked in every job: share of the bytes, the number, the same seed by seed."""
    jobs = {(cell["job"], cell["seed"]) for cell in result["cells"] if belongs(cell["job"])}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        if belongs(cell["job"]):
            groups.setdefault((cell["tool"], cell["method"], cell["budget"]), []).append(cell)
    found = []
    for (tool, method, budget), cells in groups.items():
        if any("error" in cell for cell in cells) or {(cell["job"], cell["seed"]) for cell in cells} != jobs:
            continue
        by_seed = {
            seed: number([c for c in cells if c["seed"] == seed], kind) for seed in sorted({c["seed"] for c in cells})
        }
        found.append(
            {
                "tool": tool, "method": method, "budget": budget, "bytes": statistics.fmean(c["bytes"] for c in cells),
                "value": number(cells, kind), "by_seed": by_seed, "peers": cells[0].get("peers", []),
            }
        )  # fmt: skip
    return found


def fits(point: dict[str, Any], budget: float) -> bool:
    """Whether a point counts at a budget: at the same nominal one, or of one size that is no larger."""
    return bool(point["budget"] == budget) if point["budget"] is not None else point["bytes"] <= budget


def holds(point: dict[str, Any], budget: float) -> bool:
    """Whether its bytes, as allocated, are within 1 % of the budget: what a claim rests on."""
    return bool(point["bytes"] <= budget * 1.01)


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


def best(found: list[dict[str, Any]], tool: str, budget: float, better: bool) -> dict[str, Any] | None:
    """The best point of a tool at a budget."""
    there = [p for p in found if p["tool"] == tool and holds(p, budget) and p["method"] not in ("full", "full cache")]
    sign = 1 if better else -1
    return max(there, key=lambda p: (sign * p["value"], -p["bytes"])) if there else None


def text(result: dict[str, Any]) -> str:
    """Tables in Markdown."""
    budgets = sorted({c["budget"] for c in result["cells"] if c["budget"] and c["tool"] == "compress"}, reverse=True)
    lines = []
    for title, belongs, kind, better in PANELS:
        found = points(result, belongs, kind)
        lines += [
            f"**{title}**",
            "",
            "| | " + " | ".join(f"{100 * b:g} %" for b in budgets) + " |",
            "|---|" + "---:|" * len(budgets),
        ]
        names = sorted({(p["tool"], p["method"]) for p in found})
        for tool, method in names:
            cells = []
            for budget in budgets:
                mine = [p for p in found if (p["tool"], p["method"]) == (tool, method)]
                chosen = [p for p in mine if fits(p, budget) or p["method"].startswith("full")]
                cells.append(f"{chosen[0]['value']:.2f}" if chosen else "")
            lines.append(f"| {tool}: {method} | " + " | ".join(cells) + " |")
        lines.append("")
        for budget in budgets:
            ours, theirs = best(found, "compress", budget, better), best(found, "kvpress", budget, better)
            if ours and theirs:
                lines.append(
                    f"- {100 * budget:g} %: ours {ours['value']:.2f} ({ours['method']}, {100 * ours['bytes']:.1f} % of the bytes), "
                    f"kvpress {theirs['value']:.2f} ({theirs['method']})"
                )
        for row in pairs(found, better):
            mark = "" if row["gain"] >= -2 * row["noise"] - 0.005 else "  <-- BEHIND"
            lines.append(
                f"- {row['method']} against {row['peer']} at {100 * row['budget']:g} %: {row['gain']:+.2f} +- {row['noise']:.2f}{mark}"
            )
        lines.append("")
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> str:
    """The table of the README: the best of each tool at each budget, and how far our versions of their methods are from theirs."""
    budgets = sorted({c["budget"] for c in result["cells"] if c["budget"] and c["tool"] == "compress"}, reverse=True)
    head = ["cache at most", *(name for panel in PANELS for name in (f"{panel[0]}: ours", "kvpress"))]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for budget in budgets:
        cells = [f"{100 * budget:g} %"]
        for _, belongs, kind, better in PANELS:
            found = points(result, belongs, kind)
            for tool in ("compress", "kvpress"):
                chosen = best(found, tool, budget, better)
                digits = 1 if kind == "accuracy" else 2
                text = (
                    ""
                    if chosen is None
                    else f"{chosen['value']:.{digits}f} ({chosen['method']}, {100 * chosen['bytes']:.3g} %)"
                )
                cells.append(text)
        lines.append("| " + " | ".join(cells) + " |")
    compared = [
        (row, kind) for _, belongs, kind, better in PANELS for row in pairs(points(result, belongs, kind), better)
    ]
    behind = [row for row, _ in compared if row["gain"] < -2 * row["noise"] - 0.005]
    named = "; ".join(f"{r['method']} at {100 * r['budget']:g} %: {r['gain']:+.2f} +- {r['noise']:.2f}" for r in behind)
    lines += [
        "",
        f"Our versions of kvpress's methods beside theirs at equal shares of tokens: {len(compared)} cells, behind by more than the noise "
        f"in {len(behind)}{': ' + named if named else ''}.",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], file: Path) -> None:
    """Quality against bytes: every method a line, ours in colour, kvpress's in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(16, 5))
    for axis, (title, belongs, kind, better) in zip(axes, PANELS, strict=True):
        found = points(result, belongs, kind)
        _draw_panel(axis, found, better)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("bytes of the cache, % of a plain one")
        axis.set_xscale("log", base=2)
        axis.set_xticks([6.25, 12.5, 25, 50, 100], ["6.25", "12.5", "25", "50", "100"])
        if kind == "perplexity":
            axis.set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(file)


def _draw_panel(axis: Any, found: list[dict[str, Any]], better: bool) -> None:
    theirs = sorted({p["method"] for p in found if p["tool"] == "kvpress" and p["budget"]})
    for index, method in enumerate(theirs):
        line = sorted((100 * p["bytes"], p["value"]) for p in found if p["tool"] == "kvpress" and p["method"] == method)
        axis.plot(*zip(*line, strict=True), color="0.75", lw=1, label="kvpress, every method" if index == 0 else None)
    mine = [p for p in found if p["tool"] == "compress" and p["budget"]]
    for method in sorted({p["method"] for p in mine if "+" not in p["method"]}):
        line = sorted((100 * p["bytes"], p["value"]) for p in mine if p["method"] == method)
        axis.plot(*zip(*line, strict=True), "--", lw=1, label=method)
    for method in sorted({p["method"] for p in mine if "+" in p["method"]}):
        line = sorted((100 * p["bytes"], p["value"]) for p in mine if p["method"] == method)
        axis.plot(*zip(*line, strict=True), "-o", ms=3, lw=1.6, label=method)
    for point in found:
        if point["tool"] == "compress" and not point["budget"] and point["method"] != "full cache":
            axis.plot(100 * point["bytes"], point["value"], "k*", ms=6)
            axis.annotate(point["method"], (100 * point["bytes"], point["value"]), fontsize=6)
    whole = [p["value"] for p in found if p["method"] == "full cache"]
    if whole:
        axis.axhline(whole[0], color="k", lw=0.6)
    if not better and whole:
        axis.set_ylim(whole[0] * 0.98, whole[0] * 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--readme", type=Path, help="whose table between the marks is written anew")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    print(text(result))
    draw(result, arguments.plot)
    if arguments.readme:
        before, rest = arguments.readme.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        table = summary(result)
        arguments.readme.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
