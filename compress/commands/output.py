"""Output of the commands: tables for people, one JSON object for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from pydantic_core import to_json

from compress.core.units import size
from runtime.errors import CompressError


@contextmanager
def stdout_reserved(reserved: bool) -> Iterator[None]:
    """While a command with --json computes, whatever a library prints goes to stderr."""
    if not reserved:
        yield
        return
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout


def finish(
    result: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None], failure: CompressError | None = None
) -> None:
    """Print a command's result with `show` or as one JSON object; exit with the code of `failure`, if there is one."""
    if failure is not None:
        result = {**result, "error": str(failure), "exit_code": failure.exit_code}
    if as_json:
        # NaN and infinity, which JSON does not have, become null.
        print(to_json(result, indent=2, inf_nan_mode="null", fallback=str).decode(), flush=True)
    else:
        show(result)
    if failure is not None:
        print(f"compress: {failure}", file=sys.stderr)
        raise typer.Exit(failure.exit_code)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> None:
    """A table on stdout; the columns whose numbers are in `right` are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console().print(table)


def counted(count: int, what: str) -> str:
    """`1 layer`, `3 layers`."""
    return f"{count} {what}{'s' if count != 1 else ''}"


# Parts of a result that several commands show.


def size_row(held: Mapping[str, int]) -> tuple[str, str, str, str]:
    """Table row of the manifest's `bytes`: name, before, after, note."""
    before, after = held["before"], held.get("total", held["after"])
    parts = [("model", "after"), ("draft", "draft"), ("calibrated cache", "cache_files")]
    several = [f"{name} {size(held[key])}" for name, key in parts if held.get(key)]
    made = f": {' + '.join(several)}" if len(several) > 1 else ""
    apart = f"; without the tokenizer, {size(held['tokenizer'])}" if held.get("tokenizer") else ""
    return (
        "size, all that is loaded",
        size(before),
        size(after),
        f"{before / max(after, 1):.2f} times smaller{made}{apart}",
    )


def show_readers(readers: Sequence[Mapping[str, str]]) -> None:
    """Print the engines that read an artifact (the manifest's `readable_by`)."""
    if readers:
        print_table(("readable by", "", ""), [(row["name"], row["how"], row["note"]) for row in readers])


def show_policy(written: Any, sizes: Sequence[dict[str, int]], metrics: dict[str, Any]) -> None:
    """Print the cache policy of a manifest, its sizes and its measured effect."""
    from runtime.kv_cache.policy.policy import Policy

    show_cache(Policy.parse(written).describe(), sizes)
    show_cache_quality(metrics)


def show_cache(description: str, sizes: Sequence[dict[str, int]], needs: Sequence[str] = ()) -> None:
    """Print a cache policy and the approximate bytes of sequences, beside those of a plain cache."""
    calibrated = f"    (calibrates: {', '.join(needs)})" if needs else ""
    print(f"KV cache: {description}{calibrated}")
    for row in sizes:
        share = f"{row['bytes'] / max(row['full_bytes'], 1):.0%} of a plain cache ({size(row['full_bytes'])})"
        print(f"  {row['tokens']:,} tokens: about {size(row['bytes'])}, {share}")


def show_cache_quality(metrics: dict[str, Any]) -> None:
    """Print the measured effect of a compressed cache on perplexity, if there is one."""
    from compress.kv_cache.report import own_tokens

    facts = metrics.get("kv_cache") or {}
    if "perplexity_with_cache" in metrics:
        print(
            f"  perplexity {facts['plain_perplexity']:.4g} with a plain cache, {metrics['perplexity_with_cache']:.4g} with this one "
            f"({metrics['perplexity_increase_with_cache']:+.2%}), on {facts['tokens']:,} tokens after prompts of "
            f"{facts['prompt_tokens']}; KL {facts['kl']:.4g} nats per token, same top-1 token {facts['top1_agreement']:.1%}"
        )
    if "tokens_each" in metrics:
        print(f"  {own_tokens(metrics)}")
    if "perplexity_increase_overall" in metrics:
        print(f"  perplexity increase by weights and cache together: {metrics['perplexity_increase_overall']:+.2%}")
    if "warning" in facts:
        print(f"  {facts['warning']}")


def show_draft(made: Mapping[str, Any]) -> None:
    """Print acceptance before and after training and the predicted speedup, one line per kind of text (manifest's `draft`)."""
    rows = []
    before, after, worth = (made["facts"].get(name) or {} for name in ("before", "after", "worth"))
    speedups = []
    for kind in after:
        old, new = ((each[kind]["continuations"] or each[kind]["text"])["greedy"] for each in (before, after))
        speedup = (worth.get("after") or {}).get(kind, {}).get("greedy", {}).get("speedup")
        shown = ""
        if speedup is not None:
            speedups.append(speedup)
            shown = f"{speedup:.2f}x"
        rows.append((kind.replace("_", "-"), f"{old['acceptance']:.1%}", f"{new['acceptance']:.1%}", shown))
    columns = (f"draft ({made['method']}): greedy acceptance", "before", "after", "predicted speedup")
    print_table(columns, rows, right=(1, 2, 3))
    if speedups and max(speedups) <= 1:
        print("No speedup is predicted: the draft costs more than it saves. Decoding skips it where it does not pay.")
