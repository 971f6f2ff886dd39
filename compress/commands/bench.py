"""Command `compress bench`: speed and memory of an artifact, and the comparison of drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.commands.options import (
    ADAPTER,
    DEVICE,
    DRAFTER,
    DTYPE,
    JSON,
    KERNELS,
    KV_CACHE,
    MODEL_MEMORY,
    PATH,
    SCHEME,
    THREADS,
    TRUST,
)
from compress.commands.output import counted, finish, print_table, stdout_reserved
from compress.core.units import size
from runtime.errors import RequestError

_PROMPT = 128  # tokens


def bench(
    model: str = PATH,
    reference: str | None = typer.Option(None, "--reference", "-r", help="Checkpoint run by transformers, to compare."),
    prompt_tokens: int | None = typer.Option(
        None, "--prompt-tokens", "-p", min=1, help="Tokens per prompt (default: 128; with --drafters 64)."
    ),
    new_tokens: int = typer.Option(64, "--new-tokens", "-n", min=2, help="Tokens to decode."),
    batch_size: int = typer.Option(1, "--batch-size", "-b", min=1, help="Prompts per batch."),
    repeat: int = typer.Option(3, "--repeat", min=1, help="Rounds after a warm-up; the medians are shown."),
    device: str = DEVICE,
    kernels: str = KERNELS,
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    max_memory: str | None = MODEL_MEMORY,
    kv_cache: str | None = KV_CACHE,
    drafter: str | None = DRAFTER,
    adapter: str | None = ADAPTER,
    scheme: str | None = SCHEME,
    drafters: bool = typer.Option(False, "--drafters", help="Compare all drafters that fit; store the best."),
    text: Path | None = typer.Option(None, "--text", help="With --drafters: a text file to cut prompts from."),
    save: bool = typer.Option(True, "--save/--no-save", help="With --drafters: store the best in the artifact."),
    trust_remote_code: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Measure load time, prefill and decode in tokens per second, and memory.

    Each model runs in a process of its own; a reference runs in bfloat16.
    --drafters decodes the same prompts with each drafter: prose, code, chat and edits, or those of --text.

    \b
    Examples:
      compress bench out/llama_w4
      compress bench out/my-w4 --prompt-tokens 4096 --kv-cache kivi
      compress bench out/my-w4 --drafters --text my_prompts.txt
      compress bench out/my-w4 --reference ~/models/my-llama --batch-size 4 --threads 2 --json
    """
    from compress.evaluate.speed import SpeedRequest, run_isolated

    options: dict[str, Any] = {
        "device": device, "kernels": kernels, "dtype": dtype, "threads": threads, "trust_remote_code": trust_remote_code,
        "max_memory": max_memory, "kv_cache": kv_cache, "drafter": drafter, "adapter": adapter, "scheme": scheme,
    }  # fmt: skip
    shape: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "batch_size": batch_size,
        "repeat": repeat,
    }
    if drafters:
        if reference is not None or drafter is not None:
            raise RequestError("--drafters compares drafters with plain decoding: leave out --reference and --drafter")
        with stdout_reserved(as_json):
            from compress.evaluate.drafters import compare, write_choice
            from runtime.api.load import read_device
            from runtime.checkpoint.artifact import Artifact

            result = compare(model, options, text, **shape)
            if save:
                artifact, own = Artifact(result["path"]), ("name", "speedup", "overall")
                measured = [{key: entry[key] for key in own} for entry in result["drafters"]]
                device_here = read_device(device)
                result["saved"] = str(write_choice(artifact.path, result["drafter"], artifact, device_here, measured))
        finish(result, as_json, _show_drafters)
        return
    if text is not None:
        raise RequestError("--text gives prompts for --drafters; add --drafters")
    shape["prompt_tokens"] = prompt_tokens or _PROMPT
    with stdout_reserved(as_json):
        result = run_isolated(SpeedRequest(model, options=options, **shape))
        if reference is not None:
            result["reference"] = run_isolated(SpeedRequest(reference, "transformers", options=options, **shape))
    finish(result | shape, as_json, _show)


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
    print_table(("", "model", "reference" if base else "", "better by" if base else ""), rows, right=(1, 2, 3))
    print(f"Model: {result['model']}" + (f"    Reference: {base['model']}, transformers, bfloat16" if base else ""))
    print(f"Runs on: {result['decoder']}")
    for kernel, count in result["kernels"].items():
        print(f"Kernels: {kernel}: {counted(count, 'layer')}")
    shape = f"{result['batch_size']} x {result['prompt_tokens']} prompt tokens, {result['new_tokens']} new tokens"
    rounds = f"medians of {counted(result['repeat'], 'round')}"
    print(f"{shape}; {result['device']}, {counted(result['threads'], 'thread')}; {rounds}.")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _show_drafters(result: dict[str, Any]) -> None:
    kinds = result["kinds"]
    rows = []
    for entry in result["drafters"]:
        speeds = [f"{entry['speedup'][kind]:.2f}x" if entry.get("speedup") else "" for kind in kinds]
        accepted = "nothing drafted" if entry["mean_accepted"] is None else f"{entry['mean_accepted']:.2f}"
        rows.append((entry["name"], *speeds, f"{entry['overall']:.2f}x", accepted))
    print_table(("drafter", *kinds, "overall", "accepted per draft"), rows, right=tuple(range(1, len(kinds) + 3)))
    shape = f"{result['prompts']} prompts, {result['new_tokens']} new tokens each, batches of {result['batch_size']}"
    print(f"Speedup over plain decoding: {shape}.")
    for name, reason in result["skipped"].items():
        print(f"{name} does not fit: {reason}")
    saved = f"; stored in {result['saved']}, which runtime.load follows" if "saved" in result else ""
    print(f"Best: {result['best']}{saved}")
