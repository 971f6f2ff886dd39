"""What the commands say of a draft that was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.commands.output import print_table


def show_draft(made: Mapping[str, Any]) -> None:
    """A line for each kind of text, from the manifest's `draft`: acceptance before and after, and the speedup that it promises."""
    rows = []
    before, after, worth = (made["facts"].get(name) or {} for name in ("before", "after", "worth"))
    speedups = []
    for kind in after:
        old, new = ((each[kind]["continuations"] or each[kind]["text"])["greedy"] for each in (before, after))
        promised = (worth.get("after") or {}).get(kind, {}).get("greedy", {}).get("speedup")
        told = ""
        if promised is not None:
            speedups.append(promised)
            told = f"{promised:.2f} times"
        rows.append((kind.replace("_", "-"), f"{old['acceptance']:.1%}", f"{new['acceptance']:.1%}", told))
    columns = (f"draft ({made['method']}): accepted when greedy", "before", "after", "faster, by what it reads")
    print_table("", columns, rows, right=(1, 2, 3))
    if speedups and max(speedups) <= 1:
        print(
            "That promises nothing: it is right too seldom for what it reads. Decoding will not use it where it does not pay."
        )
