"""`compress methods`: what a stage of a recipe can be, what can draft, and which fields they take."""

from __future__ import annotations

from typing import Any

import typer

from compress.commands.options import JSON
from compress.commands.output import finish, print_table
from runtime.config.messages import did_you_mean
from runtime.errors import RequestError


def methods(context: typer.Context, as_json: bool = JSON) -> None:
    """List the methods by the stage that they belong to, or show one with its fields.

    \b
    Examples:
      compress methods
      compress methods show quantize
      compress methods show gptq
      compress methods show lookup
    """
    if context.invoked_subcommand is not None:
        return
    from compress.commands.method_entries import method_groups

    groups = [group.describe() for group in method_groups()]
    found = [
        {"name": each["name"], "stage": group["stage"], "summary": each["summary"]}
        for group in groups
        for each in group["methods"]
    ]
    told = [{key: group[key] for key in ("stage", "summary", "written")} for group in groups]
    finish({"methods": found, "groups": told}, as_json, _show_list)


def _show_list(result: dict[str, Any]) -> None:
    for group in result["groups"]:
        print(f"{group['stage']}: {group['summary']}")
        print_table(("", ""), [(m["name"], m["summary"]) for m in result["methods"] if m["stage"] == group["stage"]])
    print("Fields, defaults and the paper: compress methods show NAME; a whole group: compress methods show quantize")


def show(
    name: str = typer.Argument(..., help="Name of a method, or of a group, such as quantize, kv_cache, drafter."),
    as_json: bool = JSON,
) -> None:
    """Print a method's description, paper and fields; or of a group what it is for, how it is written, and its methods.

    \b
    Examples:
      compress methods show quantize
      compress methods show gptq
    """
    from compress.commands.method_entries import method_groups

    groups = {group.name: group for group in method_groups()}
    if name in groups:
        finish(groups[name].describe(), as_json, _show_group)
        return
    entries = [entry for group in groups.values() for entry in group.entries]
    described = [entry.describe() for entry in entries if entry.name == name]
    if not described:
        hint = did_you_mean(name, [*groups, *(entry.name for entry in entries)])
        raise RequestError(f"no method '{name}'{hint or '.'} All are listed by `compress methods`")
    finish(described[0] if len(described) == 1 else {"methods": described}, as_json, _show)


def _show_group(result: dict[str, Any]) -> None:
    print(f"{result['written']}\n\n{result['stage']}: {result['summary']}")
    print_table(("method", "what it does"), [(method["name"], method["summary"]) for method in result["methods"]])
    if result["fields"]:
        print("Common fields:\n")
        _show_fields(result["fields"])
    print("\nA method with its own fields: compress methods show NAME")


def _show(result: dict[str, Any]) -> None:
    for shown in result.get("methods", [result]):
        key = "method: " if " " not in shown["stage"] else ""
        written = shown.get("written", f"{shown['stage']}: {{{key}{shown['name']}}}")
        print(f"{written}\n\n{shown['description']}\n\nSource: {shown['paper']}\n")
        _show_fields(shown["fields"])


def _show_fields(fields: list[dict[str, Any]]) -> None:
    for field in fields:
        kind = f": {field['type']} (default: {field['default']})" if field["type"] else ""
        print(f"  {field['name']}{kind}\n      {field['description']}")
