"""Printing: tables for people, one JSON object for programs, and units."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from runtime.errors import CompressError
from runtime.sizes import size

__all__ = [
    "duration",
    "end",
    "own_tokens",
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
    """What a command has to say in the end, with `show` or (None) as JSON; and the exit code of what it found wrong with it."""
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
    """How a policy holds keys and values, and what a sequence's cache then takes, about, beside a plain cache of the same model."""
    calibrated = f"    (to be calibrated: {', '.join(needs)})" if needs else ""
    print(f"KV cache: {description}{calibrated}")
    for row in sizes:
        share = f"{row['bytes'] / max(row['full_bytes'], 1):.0%} of the {size(row['full_bytes'])} of a plain cache of this model"
        print(f"  {row['tokens']:,} tokens of a text: about {size(row['bytes'])}, {share}")


def show_cache_quality(metrics: dict[str, Any]) -> None:
    """What a compressed cache does to the perplexity of what follows a prompt, as `through_cache` has measured it; else nothing."""
    facts = metrics.get("kv_cache") or {}
    if "perplexity_with_cache" in metrics:
        print(
            f"  perplexity with it {metrics['perplexity_with_cache']:.4g}, {facts['plain_perplexity']:.4g} with a plain cache "
            f"({metrics['perplexity_increase_with_cache']:+.2%}): {facts['tokens']:,} tokens after prompts of {facts['prompt_tokens']}; "
            f"KL {facts['kl']:.4g} nats a token, same most likely token {facts['top1_agreement']:.1%}"
        )
    if "tokens_each" in metrics:
        print(f"  {own_tokens(metrics)}")
    if "perplexity_increase_overall" in metrics:
        print(
            f"  increase of the perplexity by weights and cache together: {metrics['perplexity_increase_overall']:+.2%}"
        )
    if "warning" in facts:
        print(f"  {facts['warning']}")


def own_tokens(metrics: dict[str, Any]) -> str:
    """What tokens of a cache are, where a cut vocabulary has other ones than the source."""
    return (
        f"tokens of the cache are the artifact's own, of which {metrics['tokens_each']:.3f} are as much text as one of the source's; "
        "weights and cache together are counted a token of the source's"
    )


def duration(seconds: float) -> str:
    """Seconds in words: `8.1 s`, `2 min 05 s`, `1 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
