"""Command `compress sweep`: many values of one recipe, and their Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.commands.options import DEVICE, JSON, MODEL, QUIET, REPORT_TO, SET, completion, memory_limit
from compress.commands.output import counted, finish, print_table, stdout_reserved
from compress.core.resources import bundled_sweeps
from compress.core.units import duration
from runtime.errors import CompressError

_ROWS = 40


def sweep(
    sweep: str = typer.Argument(
        ...,
        help="A sweep file, or the name of a bundled sweep (`compress recipes`).",
        autocompletion=completion(bundled_sweeps),
    ),
    model: str | None = MODEL,
    output: Path | None = typer.Option(None, "--output", "-o", help="Directory of the sweep, instead of the file's."),
    set_: list[str] = SET,
    jobs: int | None = typer.Option(None, "--jobs", "-j", min=1, help="Concurrent trials (default: the file's)."),
    resume: bool = typer.Option(False, "--resume", help="Continue or extend the sweep in the output directory."),
    retry: bool = typer.Option(False, "--retry", help="With --resume: repeat failed and refused trials."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier sweep in the output directory."),
    device: str = DEVICE,
    max_memory: str | None = typer.Option(
        None, "--max-memory", metavar="SIZE", help='Memory limit of all concurrent trials together, such as "12GB".'
    ),
    report_to: str | None = REPORT_TO,
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Compress one model with many values of a recipe and show the Pareto front of quality against size or speed.

    Trials are a grid or a search by Optuna, in local processes or on a Ray cluster.
    --resume continues an interrupted sweep, even after kill -9.
    It also extends a sweep by added values or trials.
    A failed trial does not end a sweep; exit code 1 means that all failed.

    \b
    Examples:
      compress sweep llama_bits
      compress sweep my_sweep.yaml --model ~/models/my-llama --output out/my-sweep --jobs 4
      compress sweep my_sweep.yaml --resume
    """
    limit = memory_limit(max_memory)
    failure: CompressError | None = None
    with stdout_reserved(as_json):
        from compress.sweeps.run import AllFailedError
        from compress.sweeps.run import sweep as run

        try:
            done = run(
                sweep, model=model, output=output, set=set_, jobs=jobs, resume=resume, retry=retry, overwrite=overwrite,
                device=device, quiet=quiet, max_memory=limit, report_to=report_to,
            )  # fmt: skip
        except AllFailedError as error:
            done, failure = error.result, error
    result: dict[str, Any] = {"path": str(done.path), "files": [str(file) for file in done.files], **done.summary}
    finish(result, as_json, _show, failure)


def _show(result: dict[str, Any]) -> None:
    from compress.sweeps.views import columns, rows

    names = columns(result)
    keys = list(result["keys"].values())
    lines = rows(result)
    right = [0, *range(1 + len(keys), 1 + len(keys) + len(names))]
    heads = [name.replace("_", " ") for name in ("trial", *keys, *names, "front")]
    print_table(heads, [line[:-1] for line in lines[:_ROWS]], right=right)
    for line in lines[:_ROWS]:
        if line[-1]:
            print(f"trial {line[0]}: {line[-1]}")
    if len(lines) > _ROWS:
        print(f"{len(lines) - _ROWS} more trials in {Path(result['path']) / 'table.csv'}.")
    if result["text"]:
        print(f"Quality is measured on {result['text']}.")
    counts = result["counts"]
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"{told}; {len(result['pareto'])} on the Pareto front (*). Time: {duration(result['seconds'])}.")
    kept = counted(sum(trial["artifact"] is not None for trial in result["trials"]), "artifact")
    print(f"{kept} kept (keep: {result['sweep']['keep']}) in {Path(result['path']) / 'trials'}.")
    for file in result["files"]:
        print(f"Written to {file}.")
