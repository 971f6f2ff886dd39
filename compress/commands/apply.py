"""Command `compress apply`: runs a recipe and shows its effect on size and quality."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from compress.commands.options import (
    DEVICE,
    JSON,
    MAX_MEMORY,
    MODEL,
    OUTPUT,
    QUIET,
    RECIPE,
    REPORT_TO,
    SET,
    memory_limit,
)
from compress.commands.output import (
    finish,
    print_table,
    show_draft,
    show_policy,
    show_readers,
    size_row,
    stdout_reserved,
)
from compress.core.last_artifact import remember_artifact
from compress.core.units import duration, size
from runtime.errors import CompressError, RequestError

SAMPLE_TOKENS = 48


def apply(
    recipe: str = RECIPE,
    model: str | None = MODEL,
    output: Path | None = OUTPUT,
    set_: list[str] = SET,
    resume: bool = typer.Option(False, "--resume", help="Continue an unfinished run in the output directory."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier artifact in the output directory."),
    device: str = DEVICE,
    max_memory: str | None = MAX_MEMORY,
    prompt: str | None = typer.Option(None, "--prompt", help="Continue this, not the recipe's `sample`; '' for none."),
    report_to: str | None = REPORT_TO,
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Compress a checkpoint with a recipe.

    The output is a Hugging Face directory that `runtime.load()` runs.
    --resume continues an interrupted run, even after kill -9, and gives the same bytes.
    Exit code 1 with a complete artifact means that a limit of `evaluate` is exceeded.

    \b
    Examples:
      compress apply llama_w4_sparse
      compress apply recipes/llama_w4.yaml --model ~/models/my-llama --output out/my-llama-w4
      compress apply llama_w4 --set stages.0.quantize.group_size=64 --set calibration.data=my.txt
      compress apply llama_w4 --resume
      compress apply llama_w4 --model ~/models/7b --output out/7b --max-memory 6GB
      torchrun --nproc-per-node 2 -m compress apply llama_w4     two processes share the run
    """
    from compress.core.processes import is_first
    from compress.recipe import load

    limit = memory_limit(max_memory)
    loaded = load(recipe, model=model, output=output, set=set_)
    failure: CompressError | None = None
    with stdout_reserved(as_json):
        from compress.run.run import LimitError
        from compress.run.run import apply as run
        from export.readers import readable_by

        try:
            artifact = run(
                loaded,
                resume=resume,
                overwrite=overwrite,
                device=device,
                quiet=quiet,
                max_memory=limit,
                readers=readable_by,
                report_to=report_to,
            )
        except LimitError as error:
            artifact, failure = error.result, error
        if not is_first():  # rank 0 prints for all
            return
        remember_artifact(artifact.path)
        wanted = prompt if prompt is not None else loaded.sample
        sample = continue_prompt(artifact.path, wanted, device, limit) if wanted else None
    result = _result(artifact)
    if sample is not None:
        result["sample"] = {"prompt": wanted, **sample}
    finish(result, as_json, _show, failure)


def continue_prompt(path: Path, prompt: str, device: str, limit: int | None) -> dict[str, str] | None:
    """Continuation of `prompt` by the finished artifact (`text`), and what computed it (`engine`); None, with the reason on stderr, where
    this machine cannot run it."""
    import runtime
    from compress.core.progress import memory_bytes

    bound = None if limit is None else max(1, limit - memory_bytes())
    try:
        model = runtime.load(path, device=device, max_memory=bound)
        text = str(model.generate(prompt, max_new_tokens=SAMPLE_TOKENS))
        return {"text": text, "engine": f"{model.engine.device.type}: {model.engine.description}"}
    except RequestError as error:
        left = "" if limit is None else f" within what the process leaves of --max-memory {size(limit)}"
        print(f"compress: {path} is complete, but this machine cannot run its sample{left}: {error}", file=sys.stderr)
        return None


def _result(artifact: Any) -> dict[str, Any]:
    from compress.evaluate.texts import describe

    optional = ("passes", "kv_cache", "kv_cache_bytes", "draft", "readable_by")
    return {
        "path": str(artifact.path),
        "bytes": artifact.manifest["bytes"],
        "metrics": artifact.metrics,
        "texts": describe(*(artifact.manifest.get(name) for name in ("calibration", "evaluation"))),
        "text_warnings": artifact.manifest.get("warnings", []),
        **{key: artifact.manifest[key] for key in optional if key in artifact.manifest},
        "seconds": artifact.seconds,
        "peak_memory": artifact.peak_memory,
        "warnings": artifact.warnings,
    }


def _show(result: dict[str, Any]) -> None:
    from compress.evaluate.metrics import Quality
    from compress.model.stage import row_of

    rows = [size_row(result["bytes"])]
    metrics = result["metrics"]
    rows += [*map(row_of, result.get("passes") or []), *Quality.of(metrics).rows()]
    print_table(("", "before", "after", ""), rows, right=(1, 2))
    if "kv_cache" in result:
        show_policy(result["kv_cache"], result["kv_cache_bytes"], metrics)
    if "draft" in result:
        show_draft(result["draft"])
    for text in (result["texts"], *(f"Warning: {text}" for text in result["text_warnings"])):
        print(f"{text}." if text else "")
    show_readers(result.get("readable_by") or [])
    times = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in result["seconds"].items())
    done = f"Time: {times}." if times else "Already finished; nothing was changed."
    print(f"{done} Peak memory: {size(result['peak_memory'])}.")
    path, page = (shlex.quote(str(file)) for file in (result["path"], Path(result["path"]) / "report.html"))
    if "sample" in result:
        prompt = json.dumps(result["sample"]["prompt"], ensure_ascii=False)
        print(f"Runs on {result['sample']['engine']}")
        print(f"\nThe artifact continues {prompt}:\n{result['sample']['text']}")
    print(f"\nWritten to {result['path']}. Next:")
    following = [] if "cosine" in metrics else [(f'compress generate {path} "import os"', "generate text")]
    following += [
        (f"compress inspect {path} --verify", "list the tensors and check every file"),
        (f"compress export {path} --list", "list the engines it can be exported to"),
        (f"open {page}", "see the error of every layer"),
    ]
    width = max(len(command) for command, _ in following)
    for command, what in following:
        print(f"  {command:<{width}}  {what}")
