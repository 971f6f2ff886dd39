"""What the commands say of the passes that made another model before its layers were compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def show_passes(passes: Sequence[Mapping[str, Any]]) -> None:
    """A line for each, from the manifest's `passes`: "Pass: channels by obs 1,024 -> 768; parameters 12,345 -> 9,876 (-20.0%)"."""
    for made in passes:
        label, before, after, more = _told(made)
        values = f" {before} -> {after}" if before else ""
        print(f"Pass: {label}{values}{'; ' if more else ''}{more}")


def pass_rows(passes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """A row of `apply`'s table for each: what it is, before, after, and a word more."""
    return [_told(made) for made in passes]


def _told(made: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if "remove" in made:
        counts = f"{made['before']:,}", units_after(made)
        return f"{made['unit']} by {made['method']}", *counts, f"parameters {_change(made)}"
    label = f"recovery by {made['recover']}"
    if "perplexity_before" in made and "perplexity_after" in made:
        return (
            f"{label}, perplexity of rows held out of its text",
            f"{made['perplexity_before']:.4g}",
            f"{made['perplexity_after']:.4g}",
            "",
        )
    return label, "", "", f"{made['steps']:,} steps"


def units_after(made: Mapping[str, Any]) -> str:
    """How many units a layer has now: "768", or "480 to 736" where layers differ."""
    widths = made.get("widths") or [made["after"]]
    return f"{min(widths):,}" if min(widths) == max(widths) else f"{min(widths):,} to {max(widths):,}"


def _change(made: Mapping[str, Any]) -> str:
    before, after = made["parameters_before"], made["parameters_after"]
    return f"{before:,} -> {after:,} ({after / max(before, 1) - 1:+.1%})"
