#!/usr/bin/env python
"""The table of a result of `speculative.py`, in Markdown: python benchmarks/speculative_report.py RESULT.json [...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(result: dict[str, Any]) -> str:
    """A line for each drafter, temperature and batch: times as fast as plain decoding by the same program, for each kind of prompts."""
    kinds = list(dict.fromkeys(row["kind"] for row in result["ours"]["rows"]))
    lines = [f"| | {' | '.join(kinds)} | tokens a second of the first (plain) |", f"|---|{'---:|' * (len(kinds) + 1)}"]
    for who, rows in (
        ("ours", result["ours"]["rows"]),
        ("transformers", result.get("transformers", {}).get("rows", [])),
    ):
        groups: dict[tuple[str, float, int], dict[str, dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault((row["drafter"], row["temperature"], row["batch"]), {})[row["kind"]] = row
        for (drafter, temperature, batch), by_kind in groups.items():
            how = "greedy" if temperature == 0 else f"T = {temperature:g}"
            speeds = [f"{by_kind[kind]['speedup']:.2f}x" if kind in by_kind else "" for kind in kinds]
            first = by_kind.get(kinds[0])
            rate = "" if first is None else f"{first['tokens_per_second']:.0f} ({first['plain_tokens_per_second']:.0f})"
            lines.append(f"| {who}: {drafter}, {how}, batch {batch} | {' | '.join(speeds)} | {rate} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for name in sys.argv[1:]:
        result = json.loads(Path(name).read_text(encoding="utf-8"))
        print(
            f"{name}: {result['machine']['cpu']}, {result['threads']} threads, commit {result['commit']}\n\n{table(result)}\n"
        )


if __name__ == "__main__":
    main()
