"""Command `compress draft`: makes or replaces the draft of a finished artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

import compress
from compress.commands.options import DEVICE, JSON, QUIET, RECIPE, REPORT_TO, SET
from compress.commands.output import finish, show_draft, stdout_reserved


def draft(
    artifact: Path = typer.Argument(..., help="Directory of a finished artifact."),
    recipe: str = RECIPE,
    set_: list[str] = SET,
    device: str = DEVICE,
    report_to: str | None = REPORT_TO,
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Make or replace the draft of a finished artifact, for speculative decoding.

    Only the recipe's draft stage and calibration text are used.
    The artifact stays unchanged until the new draft is complete.
    The same command continues an interrupted run, even after kill -9.
    Processes of a launcher share the training.

    \b
    Examples:
      compress draft out/llama_w4 llama_w4_draft
      compress draft out/llama_w4 my.yaml --set stages.1.draft.learning_rate=3e-4
      accelerate launch -m compress.cli draft out/llama_w4 my.yaml             one process per GPU
      torchrun --nproc_per_node 2 -m compress.cli draft out/llama_w4 my.yaml --device cpu
    """
    with stdout_reserved(as_json):
        made = compress.draft(artifact, recipe, set=set_, device=device, quiet=quiet, report_to=report_to)
    if made is not None:  # rank 0 prints for all
        finish({"path": str(artifact), "draft": made}, as_json, _show)


def _show(result: dict[str, Any]) -> None:
    path, made = result["path"], result["draft"]
    show_draft(made)
    print(f"Draft by {made['method']} written to {path}, which now decodes with it. Next:")
    print(f"  compress bench {path} --drafters      compare it with other drafters on this machine")
