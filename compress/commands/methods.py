"""`compress methods`: what a stage of a recipe can be, what can draft, and which fields they take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from compress.commands.output import print_json, print_table
from compress.nearest import did_you_mean, listing
from runtime.errors import RequestError

_JSON = typer.Option(False, "--json", help="Print one JSON object.")


def register(app: typer.Typer) -> None:
    """Add the command."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(list_methods)
    group.command("show")(show_method)
    app.add_typer(group, name="methods")


def list_methods(context: typer.Context, as_json: bool = _JSON) -> None:
    """List the methods, or show one with its fields.

    \b
    Examples:
      compress methods
      compress methods show gptq
      compress methods show lookup
    """
    if context.invoked_subcommand is not None:
        return
    found = _listed()
    if as_json:
        print_json({"methods": found})
        return
    rows = [(entry["stage"], entry["name"], entry["summary"]) for entry in found]
    print_table("", ("stage", "method", "what it does"), rows)
    print("Fields, defaults and the paper: compress methods show NAME")


def show_method(name: str = typer.Argument(..., help="Name of a method."), as_json: bool = _JSON) -> None:
    """Print what a method does, its paper, and every field that a recipe, or `drafter`, may give it."""
    from compress.commands import drafter_methods, kv_methods

    described = [_describe(kind, method) for kind, method in _methods() if method.name == name]
    described += [*kv_methods.described(name), *drafter_methods.described(name)]
    if not described:
        names = list(dict.fromkeys(entry["name"] for entry in _listed()))
        raise RequestError(f"no method '{name}'{did_you_mean(name, names) or '.'} Methods: {listing(names, 80)}")
    if as_json:
        print_json(described[0] if len(described) == 1 else {"methods": described})
        return
    for entry in described:
        key = "method: " if " " not in entry["stage"] else ""
        written = entry.get("written", f"{entry['stage']}: {{{key}{entry['name']}}}")
        print(f"{written}\n\n{entry['description']}\n\nSource: {entry['paper']}\n")
        for field in entry["fields"]:
            print(f"  {field['name']}: {field['type']} (default: {field['default']})\n      {field['description']}")


def _listed() -> list[dict[str, str]]:
    from compress.commands import drafter_methods, kv_methods

    own = [{"name": method.name, "stage": kind, "summary": method.summary} for kind, method in _methods()]
    return [*own, *kv_methods.listed(), *drafter_methods.listed()]


def _methods() -> Iterator[tuple[str, Any]]:
    """Of stages that are one method with its fields."""
    from compress.recipe.stages import KINDS

    for kind in KINDS.values():
        for method in () if kind.parse is not None else kind.methods().values():
            yield kind.name, method


def _describe(kind: str, method: Any) -> dict[str, Any]:
    from compress.recipe.problems import describe_field

    fields = [
        {
            "name": name,
            "type": describe_field(field),
            "default": "required" if field.is_required() else _default(field.get_default(call_default_factory=True)),
            "description": field.description or "",
        }
        for name, field in method.config.model_fields.items()
        if name != "method"
    ]
    return {
        "name": method.name,
        "stage": kind,
        "summary": method.summary,
        "description": inspect.getdoc(method.config) or method.summary,
        "paper": method.paper,
        "needs": sorted(method.needs),
        "fields": fields,
    }


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
