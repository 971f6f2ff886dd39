"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import typer


def _complete_recipe(incomplete: str) -> list[str]:
    from compress.core.resources import bundled_recipes

    here = [str(path) for path in Path().glob("*.yaml")]
    return [name for name in [*bundled_recipes(), *here] if name.startswith(incomplete)]


RECIPE = typer.Argument(
    ..., help="A recipe file, or the name of a bundled one (`compress recipes`).", autocompletion=_complete_recipe
)
MODEL = typer.Option(None, "--model", "-m", help="Checkpoint directory or hub id, instead of the recipe's.")
OUTPUT = typer.Option(None, "--output", "-o", help="Directory of the artifact, instead of the recipe's.")
SET = typer.Option([], "--set", help="Change a recipe key, as in stages.0.quantize.bits=3; repeatable.")
MAX_MEMORY = typer.Option(
    None,
    "--max-memory",
    metavar="SIZE",
    help='Memory limit of the whole process, such as "6GB"; a run that cannot keep it is refused.',
)
DEVICE = typer.Option("auto", "--device", help="Device to compute on: auto, cpu, cuda, cuda:1.")
