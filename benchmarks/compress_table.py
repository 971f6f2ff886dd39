#!/usr/bin/env python
"""The tables of docs/results/weights.md from the JSON of `compress_vs_peers.py`: `python benchmarks/compress_table.py [--check]`.

`--check` prints instead the cells where ours misses the aim: perplexity within 0.3 % of the better peer, at least twice as fast
as the faster peer, at most half the memory of the smaller one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from compress_cells import CELLS, best_variants

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = {"llmcompressor": "llm-compressor", "gptqmodel": "GPTQModel"}
QUALITY, SPEED, MEMORY = 1.003, 0.5, 0.5

Cell = dict[str, dict[str, Any]]


def best(cell: Cell, peer: str, key: str) -> tuple[float, str] | None:
    """The smallest value of `key` over a peer's variants, and the variant's name."""
    found = [
        (run[key], name) for name, run in cell.items() if name.split(":")[0] == peer and key in run and _valid(run)
    ]
    return min(found) if found else None


def _valid(run: dict[str, Any]) -> bool:
    """A run that was asked for 2:4 and did not keep it does not count."""
    return run.get("asked_pattern") != "2:4" or run.get("holds_2_4", True)


def _ppl(run: dict[str, Any] | None) -> str:
    if run is None:
        return "–"
    if "error" in run:
        return "fails"
    return f"{run['perplexity']:.2f}" + ("" if _valid(run) else " (not 2:4)")


def quality_table(data: dict[str, Any]) -> str:
    """Perplexity: ours, each peer with its defaults, each peer at its best settings."""
    lines = [
        f"Held-out perplexity (dense: {data['dense']['perplexity']:.2f})",
        "",
        "| | ours | llm-compressor | tuned | GPTQModel | tuned |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, cell in data["cells"].items():
        row = [_ppl(cell.get("ours"))]
        for peer in PEERS:
            row.append(_ppl(cell.get(peer)))
            tuned = {key: run for key, run in cell.items() if key.startswith(f"{peer}:")}
            value = best(tuned, peer, "perplexity")
            broken = [run for run in tuned.values() if "error" not in run]
            row.append(f"{value[0]:.2f}" if value else _ppl(broken[0]) if broken else ("fails" if tuned else "–"))
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def cost_table(data: dict[str, Any]) -> str:
    """Wall time and peak memory of the whole process, each tool with its defaults."""
    names = ["ours", *PEERS]
    lines = [
        f"Whole process, imports included, on {data['machine']['cpu']}, {data['machine']['threads']} threads: wall seconds / peak "
        "resident MB (*: other work was running)",
        "",
        "| | ours | llm-compressor | GPTQModel |",
        "|---|---:|---:|---:|",
    ]
    for name, cell in data["cells"].items():
        row = []
        here = {tool: run for tool in names if (run := cell.get(tool)) and same_machine(run, data)}
        if len(here) < 2:
            continue
        for tool in names:
            run = here.get(tool)
            if run is None:
                row.append("–")
            else:
                busy = "" if run.get("load_before", 99.0) <= data["machine"]["threads"] + 1 else "*"
                row.append("fails" if "error" in run else f"{run['seconds']:.1f} s{busy} / {run['peak_mb']:.0f}")
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def best_table(data: dict[str, Any]) -> str:
    """KL divergence, perplexity and seconds of what each tool offers beyond GPTQ."""
    rows = [cell for cell in CELLS if cell.name in data["cells"]]
    tools = {"ours": "ours", **PEERS, "autoround": "AutoRound"}
    lines = [
        f"Mean KL divergence in nats, held-out perplexity (dense: {data['dense']['perplexity']:.2f}) and wall seconds of the process",
        "",
        "| | " + " | ".join(cell.name.removeprefix("gptq-") for cell in rows) + " |",
        "|---|" + "---:|" * len(rows),
    ]
    for variant in max(map(best_variants, rows), key=len):  # at 2 bits there are more
        runs = [data["cells"][cell.name].get(variant.key) for cell in rows]
        if any(runs):
            lines.append(f"| {tools[variant.tool]}, {variant.name} | " + " | ".join(map(_best_value, runs)) + " |")
    return "\n".join(lines)


def _best_value(run: dict[str, Any] | None) -> str:
    if run is None or "error" in run:
        return "–" if run is None else "fails"
    return f"{run['kl']:.4f} ({run['perplexity']:.2f}, {run['seconds']:.0f} s)"


def same_machine(run: dict[str, Any], data: dict[str, Any]) -> bool:
    """Whether a run's time and memory can be set beside the others'."""
    return "dtype" not in run and run.get("cpu", data["machine"]["cpu"]) == data["machine"]["cpu"]


def misses(data: dict[str, Any]) -> list[str]:
    """One line for each aim that a cell misses."""
    lines = []
    for name, cell in data["cells"].items():
        ours = cell.get("ours", {"error": "not run"})
        if "error" in ours:
            lines.append(f"{name}: ours failed: {ours['error'][:200]}")
            continue
        for key, factor, what in (
            ("perplexity", QUALITY, "perplexity"),
            ("seconds", SPEED, "time"),
            ("peak_mb", MEMORY, "memory"),
        ):
            comparable = {k: r for k, r in cell.items() if key == "perplexity" or same_machine(r, data)}
            rivals = [value for peer in PEERS if (value := best(comparable, peer, key))]
            if rivals and key in ours and "ours" in comparable and ours[key] > min(rivals)[0] * factor:
                rival, who = min(rivals)
                lines.append(
                    f"{name}: {what} {ours[key]:.4g}, {who} {rival:.4g} (ratio {ours[key] / rival:.4f}, aim {factor:g})"
                )
    return lines


def main() -> None:
    """Command line."""
    files = sorted([*RESULTS.glob("compress_vs_peers_*.json"), *RESULTS.glob("best_quality_*.json")])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=files)
    parser.add_argument("--check", action="store_true", help="list the aims that are missed")
    options = parser.parse_args()
    for file in options.files:
        data = json.loads(file.read_text())
        machine = data["machine"]
        print(
            f"{data['model']['name']} ({data['model']['bytes'] / 1e6:.1f} MB); {machine['cpu']}, {machine['threads']} threads\n"
        )
        if file.name.startswith("best_quality"):
            print(best_table(data) + "\n")
            continue
        if options.check:
            print("\n".join(misses(data)) or "every aim is met")
            continue
        if "dense" in data:
            print(quality_table(data) + "\n")
        print(cost_table(data) + "\n")


if __name__ == "__main__":
    main()
