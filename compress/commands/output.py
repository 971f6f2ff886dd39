"""Output of the commands: tables for people, one JSON object for programs, units."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from compress.core.units import duration, size
from runtime.errors import CompressError

# Passes that change the model before its layers are compressed.


def show_passes(passes: Sequence[Mapping[str, Any]]) -> None:
    """A line for each, from the manifest's `passes`: "Pass: channels by obs 1,024 -> 768; parameters 12,345 -> 9,876 (-20.0%)"."""
    for made in passes:
        label, before, after, more = _row(made)
        values = f" {before} -> {after}" if before else ""
        print(f"Pass: {label}{values}{'; ' if more else ''}{more}")


def pass_rows(passes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """A row of `apply`'s table for each: what it is, before, after, and a word more."""
    return [_row(made) for made in passes]


def _row(made: Mapping[str, Any]) -> tuple[str, str, str, str]:
    from compress.model.stage import row_of

    return row_of(made)


__all__ = [
    "duration",
    "end",
    "print_json",
    "print_table",
    "show_cache",
    "show_cache_quality",
    "size",
    "stdout_reserved",
]


def print_json(value: Any) -> None:
    """One JSON object on stdout. NaN and infinity, which JSON does not know, become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str), flush=True)


def end(result: dict[str, Any], failure: CompressError | None, show: Callable[[dict[str, Any]], None] | None) -> None:
    """Print a command's result with `show`, or as JSON (None), and exit with the code of `failure`, if any."""
    if failure is not None:
        result = {**result, "error": str(failure), "exit_code": failure.exit_code}
    (show or print_json)(result)
    if failure is not None:
        print(f"compress: {failure}", file=sys.stderr)
        raise typer.Exit(failure.exit_code)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@contextmanager
def stdout_reserved(reserved: bool) -> Iterator[None]:
    """While a command with --json works, whatever a library prints goes to stderr."""
    if not reserved:
        yield
        return
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()
) -> None:
    """A table on stdout; the columns whose numbers are in `right` are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns)
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console().print(table)


def show_cache(description: str, sizes: Sequence[dict[str, int]], needs: Sequence[str] = ()) -> None:
    """Print a cache policy and the approximate bytes of sequences, beside those of a plain cache."""
    calibrated = f"    (calibrates: {', '.join(needs)})" if needs else ""
    print(f"KV cache: {description}{calibrated}")
    for row in sizes:
        share = f"{row['bytes'] / max(row['full_bytes'], 1):.0%} of a plain cache ({size(row['full_bytes'])})"
        print(f"  {row['tokens']:,} tokens: about {size(row['bytes'])}, {share}")


def show_cache_quality(metrics: dict[str, Any]) -> None:
    """Print the measured effect of a compressed cache on the perplexity of what follows a prompt, if there is one."""
    from compress.report.cache import own_tokens

    facts = metrics.get("kv_cache") or {}
    if "perplexity_with_cache" in metrics:
        print(
            f"  perplexity with it {metrics['perplexity_with_cache']:.4g}, {facts['plain_perplexity']:.4g} with a plain cache "
            f"({metrics['perplexity_increase_with_cache']:+.2%}): {facts['tokens']:,} tokens after prompts of {facts['prompt_tokens']}; "
            f"KL {facts['kl']:.4g} nats per token, same top-1 token {facts['top1_agreement']:.1%}"
        )
    if "tokens_each" in metrics:
        print(f"  {own_tokens(metrics)}")
    if "perplexity_increase_overall" in metrics:
        print(f"  perplexity increase by weights and cache together: {metrics['perplexity_increase_overall']:+.2%}")
    if "warning" in facts:
        print(f"  {facts['warning']}")


# Drafts.


def show_draft(made: Mapping[str, Any]) -> None:
    """Print acceptance before and after training and the predicted speedup, one line per kind of text (manifest's `draft`)."""
    rows = []
    before, after, worth = (made["facts"].get(name) or {} for name in ("before", "after", "worth"))
    speedups = []
    for kind in after:
        old, new = ((each[kind]["continuations"] or each[kind]["text"])["greedy"] for each in (before, after))
        promised = (worth.get("after") or {}).get(kind, {}).get("greedy", {}).get("speedup")
        told = ""
        if promised is not None:
            speedups.append(promised)
            told = f"{promised:.2f}x"
        rows.append((kind.replace("_", "-"), f"{old['acceptance']:.1%}", f"{new['acceptance']:.1%}", told))
    columns = (f"draft ({made['method']}): greedy acceptance", "before", "after", "predicted speedup")
    print_table("", columns, rows, right=(1, 2, 3))
    if speedups and max(speedups) <= 1:
        print(
            "No speedup is predicted: too few tokens are accepted for what the draft reads. Decoding skips it where it does not pay."
        )
