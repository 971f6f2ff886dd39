"""`compress methods`: what a stage of a recipe can be, what can draft, and which fields they take."""

from __future__ import annotations

from typing import Any

import typer

from compress.commands.options import JSON
from compress.commands.output import finish, print_table
from runtime.config.messages import did_you_mean
from runtime.errors import RequestError


def methods(context: typer.Context, as_json: bool = JSON) -> None:
    """List the methods, or show one with its fields.

    \b
    Examples:
      compress methods
      compress methods show gptq
      compress methods show lookup
    """
    if context.invoked_subcommand is not None:
        return
    from compress.commands.method_entries import method_entries

    found = [{"name": entry.name, "stage": entry.stage, "summary": entry.summary} for entry in method_entries()]
    finish({"methods": found}, as_json, _show_list)


def _show_list(result: dict[str, Any]) -> None:
    rows = [(entry["stage"], entry["name"], entry["summary"]) for entry in result["methods"]]
    print_table(("stage", "method", "what it does"), rows)
    print("Fields, defaults and the paper: compress methods show NAME")


def show(name: str = typer.Argument(..., help="Name of a method."), as_json: bool = JSON) -> None:
    """Print a method's description, paper and fields."""
    from compress.commands.method_entries import method_entries

    entries = list(method_entries())
    described = [entry.describe() for entry in entries if entry.name == name]
    if not described:
        hint = did_you_mean(name, (entry.name for entry in entries))
        raise RequestError(f"no method '{name}'{hint or '.'} All are listed by `compress methods`")
    finish(described[0] if len(described) == 1 else {"methods": described}, as_json, _show)


def _show(result: dict[str, Any]) -> None:
    for shown in result.get("methods", [result]):
        key = "method: " if " " not in shown["stage"] else ""
        written = shown.get("written", f"{shown['stage']}: {{{key}{shown['name']}}}")
        print(f"{written}\n\n{shown['description']}\n\nSource: {shown['paper']}\n")
        for field in shown["fields"]:
            print(f"  {field['name']}: {field['type']} (default: {field['default']})\n      {field['description']}")
