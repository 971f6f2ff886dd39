"""What the runs of `decode_cpu.py` say: medians and ratios, tables, the picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode_engines import COLUMNS, ENGINES, OURS, PRODUCTS, ROWS


def by_round(runs: list[dict[str, Any]], threads: int, value: str) -> dict[str, dict[int, float]]:
    """{engine: {round: value}} of the runs that worked."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run["threads"] == threads and value in run:
            found.setdefault(run["engine"], {})[run["round"]] = run[value]
    return found


def rounds(runs: list[dict[str, Any]], threads: str) -> int:
    """How many there were; an engine may be absent from some."""
    return len({run["round"] for run in runs if run["threads"] == int(threads)})


def ratios(values: dict[str, dict[int, float]], of: str, to: str) -> float | None:
    """Median over the rounds of `of` / `to` within a round."""
    ours, theirs = values.get(of, {}), values.get(to, {})
    both = [ours[r] / theirs[r] for r in ours if r in theirs]
    return statistics.median(both) if both else None


def best_peer(values: dict[str, dict[int, float]]) -> str | None:
    """The peer with the highest median."""
    peers = {name: statistics.median(v.values()) for name, v in values.items() if name not in (*OURS, "bandwidth")}
    return max(peers, key=lambda name: peers[name]) if peers else None


KEPT = (
    "decode_tokens_per_second", "prefill_tokens_per_second", "load_seconds", "warm_seconds", "resident_used_bytes",
    "anonymous_used_bytes", "peak_bytes", "seconds", "gb_per_second", "relative_error",
)  # fmt: skip


def summarize(runs: list[dict[str, Any]], measured: tuple[str, ...]) -> dict[str, Any]:
    """Medians, spreads and ratios at every number of threads."""
    summary: dict[str, Any] = {}
    for threads in sorted({run["threads"] for run in runs}):
        engines: dict[str, Any] = {}
        for value in KEPT:
            for name, rounds in by_round(runs, threads, value).items():
                engines.setdefault(name, {})[value] = statistics.median(rounds.values())
                if value in measured:
                    engines[name][f"{value}_rounds"] = [rounds[r] for r in sorted(rounds)]
        for run in runs:
            if run["threads"] == threads and "error" in run:
                engines.setdefault(run["engine"], {})["error"] = run["error"]
        compared: dict[str, Any] = {}
        for value in measured:
            values = by_round(runs, threads, value)
            compared[value] = {
                of: {to: ratios(values, of, to) for to in values if to != of} for of in OURS if of in values
            }
            compared[f"best_peer_{value}"] = best_peer(values)
        summary[str(threads)] = {"engines": engines, "ratios": compared}
    return summary


def refresh(data: dict[str, Any]) -> None:
    """Summaries from the runs."""
    if data["runs"]:
        data["summary"] = summarize(data["runs"], ("decode_tokens_per_second", "prefill_tokens_per_second"))
    if data["products"]:
        data["product_summary"] = summarize(data["products"], ("gb_per_second", "seconds"))


def label(name: str) -> str:
    return "plain read of memory" if name == "bandwidth" else ENGINES[name].label


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(data: dict[str, Any]) -> str:
    """Markdown: one table a number of threads, then the products."""
    out: list[str] = []
    main = next((name for name in ("ours-fast", "ours") if any_ok(data, name)), "ours")
    for threads, part in data.get("summary", {}).items():
        out += [
            "", f"**{data['shape_name']}, {threads} thread{'s' if threads != '1' else ''}**: median of "
            f"{rounds(data['runs'], threads)} rounds (range)", "",
            f"| engine | decode, tokens/s | {label(main)} / it | prefill, tokens/s | {label(main)} / it "
            "| resident, MB | of it anonymous, MB | peak, MB | load, s |",
            "|---|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for name in (n for n in ENGINES if n in part["engines"]):
            row = part["engines"][name]
            if "decode_tokens_per_second" not in row:
                out.append(f"| {label(name)} | absent: {row['error'].replace('|', '/')[:120]} | | | | | | | |")
                continue
            decode, prefill = (
                part["ratios"][key].get(main, {}).get(name)
                for key in ("decode_tokens_per_second", "prefill_tokens_per_second")
            )
            out.append(
                f"| {label(name)} | {spread(row['decode_tokens_per_second_rounds'], 2)} | {times(decode)} "
                f"| {spread(row['prefill_tokens_per_second_rounds'], 1)} | {times(prefill)} "
                f"| {row['resident_used_bytes'] / 1e6:.0f} | {row['anonymous_used_bytes'] / 1e6:.0f} "
                f"| {row['peak_bytes'] / 1e6:.0f} | {row['load_seconds']:.2f} |"
            )
    for threads, part in data.get("product_summary", {}).items():
        out += [
            "", f"**One {ROWS}x{COLUMNS} int4 product, out of cache, {threads} thread{'s' if threads != '1' else ''}**: "
            f"median of up to {rounds(data['products'], threads)} rounds (range)", "",
            "| engine | microseconds | packed MB | GB/s | of the read bandwidth | relative error |", "|---|---|---|---|---|---|",
        ]  # fmt: skip
        values = by_round(data["products"], int(threads), "gb_per_second")
        sizes = by_round(data["products"], int(threads), "packed_bytes")
        for name in (n for n in PRODUCTS if n in part["engines"]):
            row = part["engines"][name]
            if "seconds" not in row:
                out.append(f"| {label(name)} | absent: {row['error'].replace('|', '/')[:120]} | | | | |")
                continue
            if name == "bandwidth":
                out.append(f"| {label(name)} | | | {spread(row['gb_per_second_rounds'], 1)} | | |")
                continue
            share = ratios(values, name, "bandwidth")
            size = next(iter(sizes[name].values()))
            out.append(
                f"| {label(name)} | {row['seconds'] * 1e6:.0f} | {size / 1e6:.1f} | {spread(row['gb_per_second_rounds'], 1)} "
                f"| {'' if share is None else f'{share:.0%}'} | {row['relative_error']:.2%} |"
            )
    loads = [run["load_before"] for run in data["runs"] + data["products"]]
    out += ["", f"Load average before a process: median {statistics.median(loads):.1f}, at most {max(loads):.1f}."]
    return "\n".join(out).strip()


def any_ok(data: dict[str, Any], name: str) -> bool:
    return any(run["engine"] == name and "error" not in run for run in data["runs"])


def plot(data: dict[str, Any], path: Path) -> None:
    """Bars: decode, prefill and memory, one row of panels a number of threads; the products below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink, faint, own, other = "#334155", "#e2e8f0", "#2563eb", "#94a3b8"
    parts = [
        (threads, "summary", [("decode_tokens_per_second", 1, "decode, tokens/s"),
                              ("prefill_tokens_per_second", 1, "prefill, tokens/s"),
                              ("peak_bytes", 1e-6, "peak memory, MB")])
        for threads in data.get("summary", {})
    ]  # fmt: skip
    products = [
        (threads, "product_summary", [("gb_per_second", 1, "GB/s")]) for threads in data.get("product_summary", {})
    ]
    panels = [(where, threads, *value) for threads, where, values in parts + products for value in values]
    if not panels:
        return
    columns = 3 if parts else len(panels)
    rows = -(-len(panels) // columns)
    drawn, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 0.9 + 3.4 * rows), squeeze=False)
    for axis, (where, threads, key, scale, title) in zip(axes.flat, panels, strict=False):
        found = data[where][threads]["engines"]
        names = [n for n in ("bandwidth", *ENGINES) if key in found.get(n, {})][::-1]
        values = [found[n][key] * scale for n in names]
        axis.barh(names, values, color=[own if n in OURS else other for n in names], height=0.7)
        axis.set_yticks(range(len(names)), [label(n) for n in names])
        for place, value in enumerate(values):
            axis.text(
                value, place, f" {value:.3g}" if value < 100 else f" {value:.0f}", va="center", fontsize=7, color=ink
            )
        kind = f"one {ROWS}x{COLUMNS} product, " if where == "product_summary" else ""
        axis.set_title(
            f"{kind}{title}, {threads} thread{'s' if threads != '1' else ''}", loc="left", fontsize=9, color=ink
        )
        axis.tick_params(labelsize=7, colors=ink, length=0)
        axis.set_xlim(0, max(values) * 1.18 if values else 1)
        axis.grid(axis="x", color=faint)
        axis.set_axisbelow(True)
        for side in axis.spines.values():
            side.set_visible(False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    drawn.suptitle(f"{data['shape_name']}, random weights, batch 1; {data['machine']['cpu']}", fontsize=10, color=ink)
    drawn.tight_layout()
    drawn.savefig(path, dpi=140, facecolor="white", metadata={"Software": None})


def finish(
    data: dict[str, Any],
    output: Path,
    table: Callable[[dict[str, Any]], str] = table,
    plot: Callable[[dict[str, Any], Path], None] = plot,
) -> None:
    """Write, print, draw."""
    output.write_text(json.dumps(data, indent=1) + "\n")
    print(table(data))
    plot(data, output.with_suffix(".png"))
