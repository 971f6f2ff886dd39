"""Command `compress eval`: quality, size and speed of a model on text, or on lm-eval tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.commands.options import ADAPTER, DEVICE, DTYPE, JSON, KERNELS, KV_CACHE, PATH, SCHEME, THREADS, TRUST
from compress.commands.output import finish, print_table, show_cache_quality, stdout_reserved
from compress.core.units import size
from runtime.errors import RequestError


def eval(
    model: str = PATH,
    text: str = typer.Option("bundled", "--text", "-t", help="A .txt, .jsonl or .parquet file, or a data set's id."),
    sequence_length: int | None = typer.Option(
        None, "--sequence-length", "-s", min=2, help="Tokens per window (default: 256, or the model's context)."
    ),
    samples: int | None = typer.Option(None, "--samples", min=1, help="Number of windows (default: the whole text)."),
    batch_size: int = typer.Option(8, "--batch-size", min=1, help="Windows per forward pass."),
    reference: str | None = typer.Option(None, "--reference", "-r", help="The uncompressed model, to compare with."),
    tasks: str | None = typer.Option(
        None,
        "--tasks",
        help="lm-eval tasks, separated by commas, instead of a text (pip install 'compress-checkpoints\\[eval]').",
    ),
    task_path: Path | None = typer.Option(None, "--task-path", help="Directory with your own lm-eval task files."),
    num_fewshot: int | None = typer.Option(None, "--num-fewshot", min=0, help="Examples in the prompt of a task."),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Run only the first requests of each task."),
    device: str = DEVICE,
    kernels: str = KERNELS,
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    kv_cache: str | None = KV_CACHE,
    adapter: str | None = ADAPTER,
    scheme: str | None = SCHEME,
    trust_remote_code: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Measure perplexity, size and speed; with --reference also KL divergence and top-1 agreement.

    The text is split into windows; every token of a window but the first is scored.
    With a cache policy (the artifact's or --kv-cache), the last quarter of each window
    is also scored from the compressed cache of the rest, beside a plain cache.

    \b
    Examples:
      compress eval out/llama_w4_sparse
      compress eval out/my-w4 --text my.txt --sequence-length 512 --reference ~/models/my-llama --json
      compress eval out/my-w4 --kv-cache '{"method": "snapkv", "keys": "int4", "values": "int4"}' --sequence-length 4096
      compress eval out/my-w4 --tasks arc_easy,hellaswag --limit 200
    """
    options: dict[str, Any] = {
        "device": device, "kernels": kernels, "dtype": dtype, "threads": threads, "trust_remote_code": trust_remote_code,
        "kv_cache": kv_cache, "adapter": adapter, "scheme": scheme,
    }  # fmt: skip
    names = _names(tasks)
    own = None if text == "bundled" else text
    ignored: dict[str, Any] = {"--task-path": task_path, "--num-fewshot": num_fewshot, "--limit": limit}
    why = "needs --tasks"
    if names:
        ignored = {"--text": own, "--reference": reference, "--kv-cache": kv_cache}
        why = "cannot be used with --tasks, which bring their own text and score answers without a cache"
    for name, value in ignored.items():
        if value is not None:
            raise RequestError(f"{name} {why}")
    with stdout_reserved(as_json):
        from compress.evaluate import evaluate, evaluate_tasks
        from compress.evaluate.lm_eval import require_lm_eval

        if names:
            require_lm_eval()  # before a large model is loaded
            import runtime

            scores = evaluate_tasks(
                runtime.load(model, **options), names, task_path=task_path, num_fewshot=num_fewshot, limit=limit,
                batch_size=batch_size,
            )  # fmt: skip
            result: dict[str, Any] = {"model": model, "tasks": scores}
        else:
            measured = evaluate(
                model, text, sequence_length=sequence_length, samples=samples, batch_size=batch_size, reference=reference,
                load_options=options,
            )  # fmt: skip
            result = {"model": model, "text": text, **measured}
    finish(result, as_json, _show_tasks if names else _show)


def _names(tasks: str | None) -> list[str]:
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if tasks is not None and not names:
        raise RequestError("--tasks is empty; give names such as arc_easy,hellaswag")
    return names


def _show(result: dict[str, Any]) -> None:
    base = result.get("reference")
    other = f"{base['perplexity']:.5g}" if base else ""
    rows: list[tuple[str, ...]] = [("perplexity", f"{result['perplexity']:.5g}", other)]
    if base:
        rows += [
            ("perplexity increase", f"{result['perplexity_increase']:+.2%}", ""),
            ("KL divergence from the reference, nats per token", f"{result['kl']:.5g}", ""),
            ("same top-1 token", f"{result['top1_agreement']:.2%}", ""),
        ]
    for label, key in (("size of the tensors on disk", "bytes"), ("weights in memory", "weight_bytes")):
        rows.append((label, size(result[key]), size(base[key]) if base else ""))
    bits = [f"{side['bits_per_weight']:.3g}" if side else "" for side in (result, base)]
    rows.append(("bits per weight, all weights", *bits))
    rows.append(("tokens scored per second", f"{result['tokens_per_second']:,.0f}", ""))
    print_table(("", "model", "reference" if base else ""), rows, right=(1, 2))
    print(f"{result['tokens']:,} tokens scored: {result['evaluated_on']}.")
    if "kv_cache" in result:
        facts = result["kv_cache"]
        saved = f"{size(facts['cache_bytes'])} instead of {size(facts['full_bytes'])}"
        read = f", of which steps read {facts['read_share']:.1%}" if "read_share" in facts else ""
        print(f"KV cache: {facts['policy']}: {saved} at the end of a window{read}")
        show_cache_quality(result)


def _show_tasks(result: dict[str, Any]) -> None:
    rows = []
    for task, metrics in result["tasks"].items():
        for name, value in metrics.items():
            if "_stderr" not in name:
                error = metrics.get(f"{name}_stderr")
                rows.append((task, name, f"{value:.4f}", f"± {error:.4f}" if error is not None else ""))
    print_table(("task", "metric", "value", ""), rows, right=(2,))
