"""Command `compress apply`: runs a recipe and shows its effect on size and quality."""

from __future__ import annotations

import json
import shlex
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
from compress.core.units import decoding_speed, duration, size
from runtime.errors import CompressError


def apply(
    context: typer.Context,
    recipe: str = RECIPE,
    model: str | None = MODEL,
    output: Path | None = OUTPUT,
    set_: list[str] = SET,
    resume: bool = typer.Option(False, "--resume", help="Continue an unfinished run in the output directory."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier artifact in the output directory."),
    device: str = DEVICE,
    max_memory: str | None = MAX_MEMORY,
    prompt: str | None = typer.Option(
        None, "--prompt", help="Prompt of the sample outputs, instead of the recipe's `sample`; '' for none."
    ),
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
    from compress.core.imports import imports

    with imports():
        from compress.core.processes import is_first
        from compress.recipe import load

    limit = memory_limit(max_memory)
    loaded = load(recipe, model=model, output=output, set=set_)
    failure: CompressError | None = None
    with stdout_reserved(as_json):
        with imports():
            from compress.core.run_directory import recorded_samples
            from compress.recipe import locate_model
            from compress.run.record import make_samples, shown_command
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
                command=shown_command(context.obj or []),
            )
        except LimitError as error:
            artifact, failure = error.result, error
        if not is_first():  # rank 0 prints for all
            return
        remember_artifact(artifact.path)
        prompts = artifact.prompts if prompt is None else [prompt] if prompt else []
        if prompts:
            source, written = locate_model(loaded), bool(artifact.seconds)
            artifact.samples = make_samples(artifact.path, source, prompts, device, limit, note=written)
        elif prompt is None and not artifact.seconds:  # finished before
            artifact.samples = recorded_samples(artifact.path)
    result = _result(artifact)
    finish(result, as_json, _show, failure)


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
        **_samples(artifact.samples),
    }


def _samples(made: dict[str, Any] | None) -> dict[str, Any]:
    """`samples`, and the artifact's first one as `sample`."""
    if made is None:
        return {}
    texts = made["artifact"]
    first = (
        {} if texts is None else {"sample": {"prompt": made["prompts"][0], "text": texts[0], "engine": made["engine"]}}
    )
    return {"samples": made, **first}


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
    if "samples" in result:
        _show_samples(result["samples"])
    print(f"\nWritten to {result['path']}. Next:")
    known = all(one["how"] != "no" for one in result.get("readable_by") or [] if one["name"] == "this runtime")
    following = [
        (f'compress generate {path} "import os"', "generate text", known and "cosine" not in metrics),
        (f"compress inspect {path} --verify", "list the tensors and check every file", True),
        (f"compress export {path} --list", "list the engines it can be exported to", known),
        (f"open {page}", "see the error of every layer", True),
    ]
    shown = [(command, what) for command, what, useful in following if useful]
    width = max(len(command) for command, _ in shown)
    for command, what in shown:
        print(f"  {command:<{width}}  {what}")


def _show_samples(samples: dict[str, Any]) -> None:
    """Print the continuations of each prompt by source and artifact, and why one of them has none."""
    if samples["engine"] is not None:
        print(f"Runs on {samples['engine']}")
    if speed := decoding_speed(samples.get("speed"), "this machine"):
        print(speed)
    names = {"source": "The source", "artifact": "The artifact"}
    for number, prompt in enumerate(samples["prompts"]):
        for name, words in names.items():
            if samples[name] is not None:
                print(f"\n{words} continues {json.dumps(prompt, ensure_ascii=False)}:\n{samples[name][number]}")
    for name, reason in samples["left_out"].items():
        print(f"\n{names[name]} has no sample output: {reason}")
