"""Command `compress tune`: measures kernels for a model on this machine, so that no request waits for it."""

from __future__ import annotations

from typing import Any

import typer

from compress.commands.options import DEVICE, DTYPE, JSON, KERNELS, KV_CACHE, MODEL_MEMORY, PATH, SCHEME, THREADS, TRUST
from compress.commands.output import counted, finish, print_table, stdout_reserved


def tune(
    model: str = PATH,
    prompt_tokens: int = typer.Option(2048, "--prompt-tokens", "-p", min=1, help="Tokens of the longest prompt."),
    batch_size: int = typer.Option(64, "--batch-size", "-b", min=1, help="Sequences of the largest batch."),
    device: str = DEVICE,
    kernels: str = KERNELS,
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    max_memory: str | None = MODEL_MEMORY,
    kv_cache: str | None = KV_CACHE,
    scheme: str | None = SCHEME,
    trust_remote_code: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Measure which kernels and launches are fastest for a model here; later loads remember it.

    On GPUs nothing else times kernels: what was never measured runs with defaults.

    \b
    Examples:
      compress tune out/llama_w4
      compress tune out/llama_w4 --prompt-tokens 8192 --batch-size 256
    """
    with stdout_reserved(as_json):
        from runtime.api.tune import tune as measure

        options: dict[str, Any] = {
            "device": device, "kernels": kernels, "dtype": dtype, "threads": threads, "max_memory": max_memory,
            "kv_cache": kv_cache, "scheme": scheme, "trust_remote_code": trust_remote_code,
        }  # fmt: skip
        measured = measure(model, prompt=prompt_tokens, batch=batch_size, **options)
    finish({"measured": measured}, as_json, _show)


def _show(result: dict[str, Any]) -> None:
    if not result["measured"]:
        print("Nothing was left to measure: all that this model needs is known.")
    for file, choices in result["measured"].items():
        rows = [(what, _text(choice)) for what, choice in sorted(choices.items())]
        print_table(("measured", "fastest"), rows)
        print(f"{counted(len(rows), 'choice')} kept in {file}")


def _text(choice: Any) -> str:
    return choice if isinstance(choice, str) else ", ".join(f"{name}={value}" for name, value in choice.items())
