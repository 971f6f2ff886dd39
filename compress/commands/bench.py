"""Command `compress bench`: speed and memory of an artifact, and the comparison of drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.commands.load_options import (
    DEVICE,
    DRAFTER,
    DTYPE,
    KERNELS,
    KV_CACHE,
    MAX_MEMORY,
    PATH,
    THREADS,
    TRUST,
    load_options,
)
from compress.commands.output import print_json, print_table, size, stdout_reserved
from runtime.errors import RequestError

_PROMPT = 128  # tokens


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


def bench(
    model: str = PATH,
    reference: str | None = typer.Option(
        None, "--reference", "-r", help="A plain checkpoint to compare with, run by transformers in bfloat16."
    ),
    prompt_tokens: int | None = typer.Option(
        None, "--prompt-tokens", "-p", min=1, help="Tokens of the random prompts.  [default: 128; with --drafters 64]"
    ),
    new_tokens: int = typer.Option(64, "--new-tokens", "-n", min=2, help="Tokens to decode."),
    batch_size: int = typer.Option(1, "--batch-size", "-b", min=1, help="Prompts per batch."),
    repeat: int = typer.Option(3, "--repeat", min=1, help="Rounds after a warm-up; the medians are shown."),
    device: str = DEVICE,
    kernels: str = KERNELS,
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    max_memory: str | None = MAX_MEMORY,
    kv_cache: str | None = KV_CACHE,
    drafter: str | None = DRAFTER,
    drafters: bool = typer.Option(
        False,
        "--drafters",
        help="Compare every drafter that fits with plain decoding, and store the best in the artifact.",
    ),
    text: str | None = typer.Option(
        None,
        "--text",
        help="With --drafters: a text file to cut prompts from (default: prose, code, chat, edits).",
    ),
    save: bool = typer.Option(
        True, "--save/--no-save", help="With --drafters: write the best to the artifact's drafter.json."
    ),
    trust_remote_code: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object on stdout and nothing else there."),
) -> None:
    """Measure speed: load time, prefill and decode in tokens per second, memory, and the kernels used.

    Each model runs in a process of its own.

    \b
    Examples:
      compress bench out/llama_w4
      compress bench out/my-w4 --prompt-tokens 4096 --kv-cache kivi
      compress bench out/my-w4 --drafters --text my_prompts.txt
      compress bench out/my-w4 --reference ~/models/my-llama --batch-size 4 --threads 2 --json
    """
    from compress.evaluate.speed import SpeedRequest, run_isolated

    options = load_options(device, kernels, dtype, threads, trust_remote_code, max_memory, kv_cache, drafter)
    if drafters:
        if reference is not None or drafter is not None:
            raise RequestError("--drafters compares drafters with plain decoding: leave out --reference and --drafter")
        compare_drafters(model, options, text, prompt_tokens, new_tokens, batch_size, repeat, save, as_json)
        return
    if text is not None:
        raise RequestError("--text gives prompts for --drafters; add --drafters")
    prompt_tokens = prompt_tokens or _PROMPT
    shape = (prompt_tokens, new_tokens, batch_size, repeat)
    with stdout_reserved(as_json):
        result = run_isolated(SpeedRequest(model, "runtime", *shape, options=options))
        if reference is not None:
            result["reference"] = run_isolated(SpeedRequest(reference, "transformers", *shape, options=options))
    result |= {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch_size": batch_size, "repeat": repeat}
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    base = result.get("reference")
    rows = []
    for label, key, faster in (
        ("prefill, tokens per second", "prefill_tokens_per_second", True),
        ("decode, tokens per second", "decode_tokens_per_second", True),
        ("time to first token, seconds", "first_token_seconds", False),
        ("load time, seconds", "load_seconds", False),
    ):
        ratio = "" if not base else f"{result[key] / base[key] if faster else base[key] / result[key]:.2f}x"
        rows.append((label, _number(result[key]), _number(base[key]) if base else "", ratio))
    for label, key in (
        ("weights in memory", "weight_bytes"),
        ("KV cache, peak", "cache_bytes"),
        ("resident memory added by loading", "resident_bytes"),
        ("peak memory of the process", "peak_bytes"),
        ("peak memory on the device", "device_peak_bytes"),
    ):
        if key in result:
            other = base.get(key) if base else None
            ratio = f"{other / result[key]:.2f}x" if other and result[key] > 0 else ""
            rows.append((label, size(result[key]), size(other) if other is not None else "", ratio))
        if key == "cache_bytes" and result.get("kv_cache_read_share") is not None:
            rows.append(("share of cached tokens read per step", f"{result['kv_cache_read_share']:.1%}", "", ""))
    print_table("", ("", "model", "reference" if base else "", "better by" if base else ""), rows, right=(1, 2, 3))
    print(f"Model: {result['model']}" + (f"    Reference: {base['model']}, transformers, bfloat16" if base else ""))
    print(f"Runs on: {result['decoder']}")
    for kernel, count in result["kernels"].items():
        print(f"Kernels: {kernel}: {_counted(count, 'layer')}")
    shape = f"{result['batch_size']} x {result['prompt_tokens']} prompt tokens, {result['new_tokens']} new tokens"
    print(
        f"{shape}; {result['device']}, {_counted(result['threads'], 'thread')}; medians of {_counted(result['repeat'], 'round')}."
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# `compress bench --drafters`: the fastest drafter of an artifact on this machine.


def compare_drafters(
    model: str,
    options: dict[str, Any],
    text: str | None,
    prompt_tokens: int | None,
    new_tokens: int,
    batch_size: int,
    repeat: int,
    save: bool,
    as_json: bool,
) -> None:
    """Measure, show, and keep the best.

    Args:
        model: artifact or checkpoint.
        options: keywords of `runtime.load`.
        text: file that prompts are cut out of.
        prompt_tokens, new_tokens, batch_size, repeat: of each measurement.
        save: write the choice into the artifact.
        as_json: one JSON object on stdout.
    """
    from compress.evaluate.drafters import compare

    with stdout_reserved(as_json):
        file = None if text is None else Path(text)
        result = compare(model, options, file, new_tokens, batch_size, repeat, prompt_tokens)
        if save:
            result["saved"] = str(_save(result, options.get("device", "auto")))
    if as_json:
        print_json(result)
        return
    kinds = result["kinds"]
    rows = []
    for entry in result["drafters"]:
        speeds = [f"{entry['speedup'][kind]:.2f}x" if entry.get("speedup") else "" for kind in kinds]
        accepted = "nothing drafted" if entry["mean_accepted"] is None else f"{entry['mean_accepted']:.2f}"
        rows.append((entry["name"], *speeds, f"{entry['overall']:.2f}x", accepted))
    print_table("", ("drafter", *kinds, "overall", "accepted per draft"), rows, right=tuple(range(1, len(kinds) + 3)))
    print(
        f"Speedup over plain decoding: {result['prompts']} prompts, {new_tokens} new tokens each, batches of {batch_size}."
    )
    for name, reason in result["skipped"].items():
        print(f"{name} does not fit: {reason}")
    print(f"Best: {result['best']}" + (f"; stored in {result['saved']}, which runtime.load follows" if save else ""))


def _save(result: dict[str, Any], device: Any) -> Path:
    """Keep the best for the directory and this machine, with what was measured."""
    from runtime.api.load import read_device
    from runtime.checkpoint.artifact import Artifact
    from runtime.drafting.config.artifact_draft import write_choice

    artifact = Artifact(result["path"])
    measured = [{key: entry[key] for key in ("name", "speedup", "overall")} for entry in result["drafters"]]
    return write_choice(artifact.path, result["drafter"], artifact, read_device(device), measured)
