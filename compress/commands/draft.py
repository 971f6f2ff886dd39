"""`compress draft`: give a finished artifact a draft, or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.commands.options import DEVICE, RECIPE, SET
from compress.commands.output import print_json, show_draft, stdout_reserved


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("draft")(draft)


def draft(
    artifact: Path = typer.Argument(..., help="Directory of a finished artifact."),
    recipe: str = RECIPE,
    set_: list[str] = SET,
    device: str = DEVICE,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress on stderr."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object on stdout and nothing else there."),
) -> None:
    """Make the draft of a finished artifact, or replace the one that it has.

    Of the recipe only its draft stage and its calibration text count. The artifact is as it was until the new draft is complete.
    A run that was interrupted, even by kill -9, goes on when the same command is given again. Several processes share the
    training when a launcher starts them.

    \b
    Examples:
      compress draft out/llama_w4 llama_w4_draft
      compress draft out/llama_w4 my.yaml --set stages.1.draft.learning_rate=3e-4
      accelerate launch -m compress.cli draft out/llama_w4 my.yaml             a process on every GPU
      torchrun --nproc_per_node 2 -m compress.cli draft out/llama_w4 my.yaml --device cpu
    """
    from compress.recipe import load

    loaded = load(recipe, set=set_)
    with stdout_reserved(as_json):
        from compress.run.redraft import redraft

        made = redraft(artifact, loaded, device=device, quiet=quiet)
    if made is None:  # the main process speaks for all
        return
    if as_json:
        print_json({"path": str(artifact), "draft": made})
    else:
        _show(artifact, made)


def _show(artifact: Path, made: dict[str, Any]) -> None:
    show_draft(made)
    print(f"Made by {made['method']} and written to {artifact}, which decodes with it from now on.")
    print(f"  compress bench {artifact} --drafters      whether it is the fastest here")
