"""Command `compress recipes`: the bundled recipes and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from compress.commands.options import JSON
from compress.commands.output import finish, print_table


def recipes(context: typer.Context, as_json: bool = JSON) -> None:
    """List the bundled recipes and sweeps, or show one.

    \b
    Examples:
      compress recipes
      compress recipes show llama_w4              print one
      compress recipes show llama_w4 > mine.yaml  start your own
    """
    from compress.core.resources import bundled_recipes, bundled_sweeps

    if context.invoked_subcommand is not None:
        return
    recipes = [
        entry
        | {
            "family": _FAMILIES.get(entry["name"].partition("_")[0], "Others"),
            "stages": [_stage(kind, fields) for stage in entry["stages"] for kind, fields in stage.items()],
        }
        for entry in _entries(bundled_recipes(), "stages")
    ]
    finish({"recipes": recipes, "sweeps": _entries(bundled_sweeps(), "recipe")}, as_json, _show)


#: By the first part of a recipe's name: the models that it is for.
_FAMILIES = {
    "llama": "Decoders (Llama, Qwen, Gemma, Mistral, Phi, ...)",
    "moe": "Mixtures of experts",
    "vlm": "Vision-language models",
    "bert": "Encoders",
}


def _show(result: dict[str, Any]) -> None:
    groups: dict[str, list[tuple[str, str, str]]] = {title: [] for title in _FAMILIES.values()}
    for entry in result["recipes"]:
        row = (entry["name"], ", ".join(entry["stages"]), entry["description"])
        groups.setdefault(entry["family"], []).append(row)
    for title, rows in groups.items():
        print(title)
        print_table(("recipe", "stages", "what it does"), rows)
    print("Run: compress apply NAME          Print: compress recipes show NAME\n")
    rows = [(entry["name"], entry["recipe"], entry["description"]) for entry in result["sweeps"]]
    print_table(("sweep", "recipe", "what it varies"), rows)
    print("Run: compress sweep NAME          Print: compress recipes show NAME")


def _entries(files: dict[str, Path], key: str) -> list[dict[str, Any]]:
    """Name, description, `key` and path of each file, not validated: validation imports the methods, and with them torch."""
    from compress.recipe.yaml_source import parse

    entries = []
    for name, path in files.items():
        data, _ = parse(path.read_text(encoding="utf-8"), str(path))
        entries.append({"name": name, "description": data["description"], key: data[key], "path": str(path)})
    return entries


def _stage(kind: str, fields: Any) -> str:
    """A stage in a word or two; a policy of the cache may be a name, or keys without one."""
    method = fields.get("method") if isinstance(fields, dict) else fields
    return f"{kind} ({method})" if method else kind


def show(
    name: str = typer.Argument(..., help="Name of a bundled recipe or sweep, or a recipe file."), as_json: bool = JSON
) -> None:
    """Print a recipe or sweep as written; with --json, validated and with every default filled in."""
    from compress.core.resources import bundled_sweeps
    from compress.recipe import find_recipe

    sweep = bundled_sweeps().get(name)
    path = sweep or find_recipe(name)
    result: dict[str, Any] = {"path": str(path)}
    if as_json and sweep is not None:
        from compress.sweeps import load_sweep

        result["sweep"] = load_sweep(path)[0].resolved()
    elif as_json:
        from compress.recipe import load

        result["recipe"] = load(path).resolved()
    finish(result, as_json, lambda _: print(path.read_text(encoding="utf-8"), end=""))
