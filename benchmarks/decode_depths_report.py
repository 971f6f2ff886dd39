"""What the runs of `decode_depths.py` say: medians, ratios to the best peer, tables and the picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from decode_engines import DEEP_ENGINES, OURS, PAIRS

EXACT, FAST = 1.0, 1.3  # what a prompt should reach of the best peer, by mode
DECODE = 1.15
BESIDE_PEERS = [name for name, engine in DEEP_ENGINES.items() if name in OURS and engine.reads == "w4"]


class Cell(NamedTuple):
    """One number of a table."""

    model: str
    threads: int
    kind: str  # "prefill", "decode"
    length: int

    def title(self) -> str:
        size = f"{self.length // 1024}k" if self.length >= 1024 else str(self.length)
        return f"prompt of {size}" if self.kind == "prefill" else f"decode at {size}"


def cells(data: dict[str, Any]) -> dict[Cell, dict[str, dict[int, float]]]:
    """{cell: {engine: {round: tokens/s}}}, of what was measured."""
    found: dict[Cell, dict[str, dict[int, float]]] = {}
    for run in data["runs"]:
        for kind in ("prefill", "decode"):
            for length, value in run.get(kind, {}).items():
                cell = Cell(run["model"], run["threads"], kind, int(length))
                found.setdefault(cell, {}).setdefault(run["engine"], {})[run["round"]] = value
    return dict(sorted(found.items(), key=lambda item: (item[0][:2], item[0].kind != "prefill", item[0].length)))


def ratio(values: dict[str, dict[int, float]], of: str, to: str) -> float | None:
    """The median of the ratios within the rounds."""
    ours, theirs = values.get(of, {}), values.get(to, {})
    both = [ours[r] / theirs[r] for r in ours if r in theirs]
    return statistics.median(both) if both else None


def to_best(values: dict[str, dict[int, float]], of: str) -> tuple[float, str] | None:
    """Ratio to the best peer, and its name: the least of the ratios."""
    ratios = {name: ratio(values, of, name) for name in values if name not in OURS}
    found = [(each, name) for name, each in ratios.items() if each is not None]
    return min(found) if found else None


def goal(cell: Cell, name: str) -> float:
    """What `name` should reach of the best peer."""
    if cell.kind == "decode":
        return DECODE
    return FAST if "fast" in name else EXACT


def why(data: dict[str, Any], cell: Cell, name: str) -> str:
    """Why an engine has no number there; empty: it was not run."""
    for run in data["runs"]:
        if (run["model"], run["threads"], run["engine"]) == (cell.model, cell.threads, name):
            reason = run.get("error") or run.get("left_out", {}).get(f"{cell.kind} {cell.length}")
            if reason:
                return str(reason).replace("|", "/")
    return ""


def table(data: dict[str, Any]) -> str:
    """Markdown: one table a model and number of threads, with the reasons for holes below it."""
    every, out = cells(data), []
    for model, threads in dict.fromkeys(cell[:2] for cell in every):
        mine = [cell for cell in every if cell[:2] == (model, threads)]
        shape = data["models"][model]
        size = ", ".join(f"{value} {key.replace('-', ' ')}" for key, value in shape.items())
        out += [
            "", f"**{model}, {threads} thread{'s' if threads != 1 else ''}** ({size}), tokens/s", "",
            f"| engine | {' | '.join(cell.title() for cell in mine)} |", f"|---{'|---' * len(mine)}|",
        ]  # fmt: skip
        notes: dict[str, list[str]] = {}
        for name, engine in DEEP_ENGINES.items():
            row = []
            for cell in mine:
                values = every[cell].get(name)
                row.append("" if values is None else f"{statistics.median(values.values()):.1f}")
                reason = "" if values else why(data, cell, name)
                if reason:
                    notes.setdefault(f"{engine.label}: {reason}", []).append(cell.title())
            if any(row):
                out.append(f"| {engine.label} | {' | '.join(row)} |")
        for name in BESIDE_PEERS:
            found = [(cell, to_best(every[cell], name)) for cell in mine]
            row = [
                "" if best is None else f"{best[0]:.2f}x {DEEP_ENGINES[best[1]].label.split(' ')[0]}"
                + ("" if best[0] >= goal(cell, name) else " (short)" if best[0] >= 1 else " **(loses)**")
                for cell, best in found
            ]  # fmt: skip
            if any(row):
                out.append(f"| {DEEP_ENGINES[name].label} / the best peer | {' | '.join(row)} |")
        for name, other in PAIRS.items():
            row = [
                "" if each is None else f"{each:.2f}x" for each in (ratio(every[cell], name, other) for cell in mine)
            ]
            if any(row):
                out.append(f"| {DEEP_ENGINES[name].label} / {DEEP_ENGINES[other].label} | {' | '.join(row)} |")
        out += ["", *(f"- {note} ({', '.join(where)})" for note, where in notes.items())]
    rounds = max((run["round"] for run in data["runs"]), default=0)
    loads = [run["load_before"] for run in data["runs"] if "load_before" in run]
    if loads:
        out += [
            "",
            f"Median of up to {rounds} rounds. Load average before a process: median {statistics.median(loads):.1f}.",
        ]
    return "\n".join(out).strip()


def plot(data: dict[str, Any], path: Path) -> None:
    """A map of ratios to the best peer: rows are ours, columns the cells; red where we lose, amber where the goal is missed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = cells(data)
    columns = list(dict.fromkeys((cell.kind, cell.length) for cell in every))
    names = [name for name in BESIDE_PEERS if any(name in values for values in every.values())]
    rows = [(model, threads, name) for model, threads in dict.fromkeys(cell[:2] for cell in every) for name in names]
    if not rows:
        return
    drawn, axis = plt.subplots(figsize=(3.4 + 1.75 * len(columns), 1.2 + 0.36 * len(rows)))
    for y, (model, threads, name) in enumerate(rows):
        for x, (kind, length) in enumerate(columns):
            cell = Cell(model, threads, kind, length)
            best = to_best(every.get(cell, {}), name)
            colour = "#f1f5f9"
            if best is not None:
                colour = "#86efac" if best[0] >= goal(cell, name) else "#fde68a" if best[0] >= 1 else "#fca5a5"
                label = f"{best[0]:.2f}x  {DEEP_ENGINES[best[1]].label.replace(' Runtime', '').split(' ')[0]}"
                axis.text(x, y, label, ha="center", va="center", fontsize=7, color="#0f172a")
            axis.add_patch(plt.Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, color=colour))
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xticks(range(len(columns)), [Cell("", 0, *column).title() for column in columns], fontsize=8)
    axis.xaxis.tick_top()
    labels = [
        f"{model}, {threads} thread{'s' if threads > 1 else ''}: {DEEP_ENGINES[n].label}" for model, threads, n in rows
    ]
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    goals = f"green: decode {DECODE}x, prompts {EXACT}x exact and {FAST}x fast; amber: ahead, but less; red: behind; grey: not measured"
    axis.set_title(
        f"ours / the best peer, random weights, batch 1; {data['machine']['cpu']}\n{goals}",
        fontsize=8,
        loc="left",
        pad=24,
    )
    drawn.tight_layout()
    drawn.savefig(path, dpi=140, facecolor="white", metadata={"Software": None})
