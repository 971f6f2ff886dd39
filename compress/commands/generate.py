"""Command `compress generate`: generates text from a prompt, or transcribes a sound."""

from __future__ import annotations

import sys
from typing import Any

import typer

from compress.commands.options import (
    DEVICE,
    DRAFTER,
    DTYPE,
    JSON,
    KERNELS,
    KV_CACHE,
    MODEL_MEMORY,
    PATH,
    THREADS,
    TRUST,
)
from compress.commands.output import finish, stdout_reserved
from runtime.errors import RequestError


def generate(
    model: str = PATH,
    prompt: str = typer.Argument(..., metavar="PROMPT", help="The prompt, - for stdin, or a .wav file (speech)."),
    max_new_tokens: int | None = typer.Option(
        None, "--max-new-tokens", "-n", min=1, help="Stop after this many tokens (default: 128)."
    ),
    temperature: float = typer.Option(0.0, "--temperature", "-T", help="0: greedy; above 0: sample."),
    top_k: int | None = typer.Option(None, "--top-k", help="Sample among the k most likely tokens."),
    top_p: float = typer.Option(1.0, "--top-p", help="Sample among the likeliest tokens of this total probability."),
    min_p: float = typer.Option(0.0, "--min-p", help="Drop tokens less likely than this fraction of the most likely."),
    repetition_penalty: float = typer.Option(1.0, "--repetition-penalty", help="Above 1: discourage repetition."),
    stop: list[str] = typer.Option([], "--stop", help="Stop before this text; repeatable."),
    seed: int | None = typer.Option(None, "--seed", help="Make sampling reproducible."),
    language: str | None = typer.Option(None, "--language", help="Speech models: language of the audio, such as en."),
    task: str | None = typer.Option(None, "--task", help="Speech models: transcribe or translate."),
    stream: bool = typer.Option(False, "--stream", help="Print the text as it is generated."),
    verify: bool | None = typer.Option(
        None, "--verify/--no-verify", show_default=False, help="Check all SHA-256 first (default: if up to 1 GiB)."
    ),
    device: str = DEVICE,
    kernels: str = KERNELS,
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    max_memory: str | None = MODEL_MEMORY,
    kv_cache: str | None = KV_CACHE,
    drafter: str | None = DRAFTER,
    trust_remote_code: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Generate text from a prompt. Only the new text goes to stdout; the speed goes to stderr.

    \b
    Examples:
      compress generate out/llama_w4_sparse "def read_lines(path):"
      compress generate out/my-w4 "Once upon a time" --stream --temperature 0.8 --top-p 0.95 --seed 1
      compress generate out/my-w4 - --kv-cache '{"method": "snapkv", "keys": "int4", "values": "int4"}' < long.txt
      compress generate out/whisper-w4 talk.wav --language en
      cat prompt.txt | compress generate out/my-w4 - -n 64 --stop $'\\n\\n'
    """
    if stream and as_json:
        raise RequestError("--stream prints text as it is generated, --json one object at the end; use one of them")
    if prompt == "-":
        prompt = sys.stdin.read()
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "stop": stop, "seed": seed,
    }  # fmt: skip
    options |= {name: value for name, value in (("language", language), ("task", task)) if value is not None}
    with stdout_reserved(as_json):
        import runtime

        loaded = runtime.load(
            model, device=device, kernels=kernels, dtype=dtype, threads=threads, trust_remote_code=trust_remote_code,
            max_memory=max_memory, kv_cache=kv_cache, drafter=drafter, verify=verify,
        )  # fmt: skip
        if not hasattr(loaded, "generate"):
            raise RequestError(f"{model} holds a {type(loaded).__name__}, which makes embeddings, not text")
        if stream and not hasattr(loaded, "stream"):
            raise RequestError(f"{model} holds a {type(loaded).__name__}, which does not stream: leave out --stream")
        if stream:
            for part in loaded.stream(prompt, **options):
                print(part, end="", flush=True)
            text = ""
        else:
            text = loaded.generate(prompt, **options)
    finish({"model": model, "prompt": prompt, "text": text, "stats": loaded.stats}, as_json, _show)


def _show(result: dict[str, Any]) -> None:
    print(result["text"])  # empty after --stream
    stats = result["stats"]
    text = (
        f"{stats['new_tokens']} tokens, {stats['tokens_per_second']:.1f} per second; "
        f"prompt of {stats['prompt_tokens']} tokens read in {stats['prefill_seconds']:.2f} s"
    )
    if stats.get("drafted_tokens"):
        text += f"; {stats['drafted_tokens']} tokens drafted ({stats['drafter']}), {stats['accepted_tokens']} of them accepted"
    print(text, file=sys.stderr)
