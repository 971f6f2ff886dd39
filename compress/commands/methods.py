"""`compress methods`: what a stage of a recipe can be, what can draft, and which fields they take."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from compress.commands.output import print_json, print_table
from compress.core.suggest import did_you_mean, listing
from runtime.config.fields import annotation, choices, options_of
from runtime.config.ranges import Range, range_of
from runtime.errors import RequestError

# What `compress methods` says of a dataclass: its fields, their types and defaults, what its docstring says.


def fields_of(cls: Any, hidden: Iterable[str]) -> list[dict[str, Any]]:
    """Name, type, default and description of the fields that a policy or a drafter may give, all but the hidden ones."""
    if not hasattr(cls, "__dataclass_fields__"):
        return []
    told = _attributes(cls)
    return [
        {
            "name": field.name,
            "type": _type(field),
            "default": "required" if field.default is dataclasses.MISSING else shown(field.default),
            "description": told.get(field.name, ""),
        }
        for field in options_of(cls, hidden).values()
    ]


def _type(field: dataclasses.Field[Any]) -> str:
    allowed = choices(field)
    if allowed:
        return f"one of {', '.join(allowed)}"
    names = {
        "int": "an integer",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
        "Score": "a score",
        "tuple[int, ...]": "a list of integers",
    }
    kinds = [kind.strip() for kind in annotation(field).split("|")]
    # Some fields take more in Python than can be written.
    written = [kind for kind in kinds if kind in names] or [kind for kind in kinds if kind != "None"]
    words = " or ".join(names.get(kind, kind) for kind in written)
    limits = range_of(field)
    return words if limits == Range() or not {"int", "float"} & set(kinds) else f"{words} {limits}"


def _attributes(cls: Any) -> dict[str, str]:
    """{field: its description} from the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    names = "|".join(field.name for field in dataclasses.fields(cls))
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        _, _, section = text.partition("Attributes:\n")
        # One a line, or the next after the full stop of the one before.
        for line in re.split(rf"\n(?=    \w[\w, ]*: )|(?<=\.)\s+(?=(?:{names}): )", section.split("\n\n")[0]):
            name, _, words = line.strip().partition(": ")
            for each in name.split(","):
                if words:
                    found[each.strip()] = " ".join(words.split())
    return found


def summary_of(cls: Any) -> str:
    """The first paragraph of its docstring, without what it is from."""
    text = (inspect.getdoc(cls) or "").split("\n\n")[0].split("Parts:")[0].strip()
    return re.sub(r"\s*\([^()]*(?:arXiv|seed)[^()]*\)", "", " ".join(text.split())).rstrip(".")


def shown(value: Any) -> str:
    """A default as it is written."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


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
