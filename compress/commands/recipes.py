"""Command `compress recipes`: the bundled recipes and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.commands.output import print_json, print_table

_JSON = typer.Option(False, "--json", help="Print one JSON object.")


def register(app: typer.Typer) -> None:
    """Add the command."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(list_recipes)
    group.command("show")(show_recipe)
    app.add_typer(group, name="recipes")


def list_recipes(context: typer.Context, as_json: bool = _JSON) -> None:
    """List the bundled recipes and sweeps, or show one.

    \b
    Examples:
      compress recipes
      compress recipes show llama_w4              print one
      compress recipes show llama_w4 > mine.yaml  start your own
    """
    if context.invoked_subcommand is not None:
        return
    entries, sweeps = _entries(), _sweeps()
    if as_json:
        print_json({"recipes": entries, "sweeps": sweeps})
        return
    rows = [(entry["name"], ", ".join(entry["stages"]), entry["description"]) for entry in entries]
    print_table("", ("recipe", "stages", "what it does"), rows)
    print("Run: compress apply NAME          Print: compress recipes show NAME\n")
    print_table("", ("sweep", "recipe", "what it varies"), [(s["name"], s["recipe"], s["description"]) for s in sweeps])
    print("Run: compress sweep NAME          Print: compress recipes show NAME")


def show_recipe(
    name: str = typer.Argument(..., help="Name of a bundled recipe or sweep, or a file."), as_json: bool = _JSON
) -> None:
    """Print a recipe or sweep as written; with --json, validated and with every default filled in."""
    from compress.core.resources import bundled_sweeps
    from compress.recipe import find_recipe

    path = bundled_sweeps().get(name)
    if path is not None:
        _show_sweep(path, as_json)
        return
    path = find_recipe(name)
    if as_json:
        from compress.recipe import load

        print_json({"path": str(path), "recipe": load(path).resolved()})
    else:
        print(path.read_text(encoding="utf-8"), end="")


def _entries() -> list[dict[str, Any]]:
    # Reads the files without validating them: that would import the methods, and with them torch.
    from compress.core.resources import bundled_recipes
    from compress.recipe.yaml_source import parse

    entries = []
    for name, path in bundled_recipes().items():
        data, _ = parse(path.read_text(encoding="utf-8"), str(path))
        stages = [_stage(kind, fields) for stage in data["stages"] for kind, fields in stage.items()]
        entries.append({"name": name, "description": data["description"], "stages": stages, "path": str(path)})
    return entries


def _show_sweep(path: Path, as_json: bool) -> None:
    if as_json:
        from compress.sweeps import load_sweep

        print_json({"path": str(path), "sweep": load_sweep(path)[0].resolved()})
    else:
        print(path.read_text(encoding="utf-8"), end="")


def _sweeps() -> list[dict[str, Any]]:
    from compress.core.resources import bundled_sweeps
    from compress.recipe.yaml_source import parse

    found = []
    for name, path in bundled_sweeps().items():
        data, _ = parse(path.read_text(encoding="utf-8"), str(path))
        found.append({"name": name, "description": data["description"], "recipe": data["recipe"], "path": str(path)})
    return found


def _stage(kind: str, fields: Any) -> str:
    """A stage in a word or two; a policy of the cache may be a name, or keys without one."""
    method = fields.get("method") if isinstance(fields, dict) else fields
    return f"{kind} ({method})" if method else kind
