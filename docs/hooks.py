"""MkDocs hook that generates the reference: recipe keys, methods and commands, read from the code that validates and runs them.

`mkdocs.yml` names this file under `hooks`. Nothing it writes is stored in the repository.
"""

from __future__ import annotations

import ast
import html
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, create_model

ROOT = Path(__file__).resolve().parent.parent
#: Stages and runtime options whose methods get a page each, with its first sentence.
METHOD_PAGES = {
    "structure": "Methods of the stage `structure`: structured pruning, which makes shapes smaller.",
    "rotate": "Methods of the stage `rotate`: orthogonal matrices folded into the weights, which spread outliers.",
    "permute": "Methods of the stage `permute`: channels renumbered, which keeps the function.",
    "prune": "Methods of the stage `prune`: weights that become zero.",
    "quantize": "Methods of the stage `quantize`: weights, and activations, in few bits.",
    "recover": "Methods of the stage `recover`: training that wins quality back.",
    "draft": "Methods of the stage `draft`: drafts for speculative decoding.",
    "kv_cache": "Methods of the stage `kv_cache`, of `runtime.load(kv_cache=...)` and of `--kv-cache`.",
    "drafter": "Methods of `runtime.load(drafter=...)` and of `--drafter`.",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site's files (event of MkDocs)."""
    from mkdocs.structure.files import File

    for uri, text in pages().items():
        files.append(File.generated(config, uri, content=text))
    return files


def pages() -> dict[str, str]:
    """Every generated page: path below `docs/` to Markdown."""
    made = {"contributing.md": contributing(), "reference/recipe.md": recipe_page(), "reference/sweep.md": sweep_page()}
    made["reference/export_targets.md"] = export_page()
    made.update({f"reference/methods/{name}.md": text for name, text in method_pages().items()})
    made.update({f"reference/commands/{name}.md": text for name, text in command_pages().items()})
    return made


def contributing() -> str:
    """`CONTRIBUTING.md` with its links turned towards the site."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.sub(r"\]\(docs/", "](", text)


def recipe_page() -> str:
    """Every key of a recipe outside its stages."""
    from compress.recipe import Recipe

    parts = [
        "# Recipe keys\n\nA recipe is YAML. Unknown keys, wrong types and values out of range are refused with file, line and the "
        "nearest valid name. The stages are on pages of their own: "
        + ", ".join(f"[`{name}`](methods/{name}.md)" for name in METHOD_PAGES if name != "drafter")
        + ". [Compress](../guides/compress.md) explains a recipe line by line."
    ]
    return "\n".join(parts + list(_sections(Recipe, "")))


def sweep_page() -> str:
    """Every key of a sweep."""
    from compress.sweeps.models import RayConfig, SearchConfig, SpeedConfig, SweepFile

    parts = ["# Sweep keys\n\n[Sweep](../guides/sweep.md) explains a sweep line by line.", *_sections(SweepFile, "")]
    for key, model in (("search", SearchConfig), ("speed", SpeedConfig), ("ray", RayConfig)):
        parts += _sections(model, f"{key}.")
    return "\n".join(parts)


def export_page() -> str:
    """Every export target and its options."""
    from export import targets

    parts = ["# Export targets\n\nOptions are given by `--set NAME=VALUE`, some also by a flag of their own: "
             "[compress export](commands/export.md). [Export](../guides/export.md) explains the targets."]  # fmt: skip
    for name in targets.names():
        target = targets.get(name)
        told, rows = {}, []  # type: dict[str, str], list[tuple[str, ...]]
        for base in reversed(target.options.__mro__[:-2]):
            told.update(_field_docstrings(base))
        for key, field in target.options.model_fields.items():
            rows.append((f"`{key}`", _kind(_schema(target.options)[key]), _default(field), told.get(key, "")))
        parts.append(
            f"## {name}\n\n{_text(target.summary)}\n\n" + _table(("option", "type", "default", "what it does"), rows)
        )
    return "\n\n".join(parts)


def _field_docstrings(model: type) -> dict[str, str]:
    """Strings below the fields of a class."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0].body  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return {}
    pairs = itertools.pairwise(body)
    return {
        a.target.id: " ".join(b.value.value.split())
        for a, b in pairs
        if isinstance(a, ast.AnnAssign)
        and isinstance(a.target, ast.Name)
        and isinstance(b, ast.Expr)
        and isinstance(b.value, ast.Constant)
    }


def method_pages() -> dict[str, str]:
    """One page a stage, with the fields of each method, as `compress methods show` prints them."""
    listed = json.loads(_printed("methods", "--json"))["methods"]
    names = {page: [] for page in METHOD_PAGES}  # type: dict[str, list[str]]
    for entry in listed:
        page = entry["stage"].split()[0]
        if entry["name"] not in names.get(page, [entry["name"]]):  # stages of other packages have no page here
            names[page].append(entry["name"])
    made = {}
    for page, first in METHOD_PAGES.items():
        parts = [f"# {page}\n\n{first}"]
        for name in names[page]:
            shown = json.loads(_printed("methods", "show", name, "--json"))
            for entry in shown.get("methods", [shown]):
                if entry["stage"].split()[0] == page:
                    parts.append(_method(entry))
        made[page] = "\n\n".join(parts) + "\n"
    return made


def command_pages() -> dict[str, str]:
    """One page a command, from the command line's own definition."""
    from compress.cli import build

    group = typer.main.get_command(build())
    return {name: _command(command, f"compress {name}", 1) for name, command in sorted(group.commands.items())}  # type: ignore[attr-defined]


def _printed(*arguments: str) -> str:
    """What a command prints on stdout."""
    import contextlib
    import io

    from compress.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(list(arguments))
    if code:
        raise RuntimeError(f"compress {' '.join(arguments)} ended with {code}")
    return out.getvalue()


def _method(entry: dict[str, Any]) -> str:
    role = entry["stage"].partition(" ")[2]
    written = entry.get("written", f"{entry['stage']}: {{method: {entry['name']}}}")
    lines = [f"## {entry['name']}" + (f" ({role})" if role else ""), f"`{written}`" if not role else "", ""]
    lines += [_text(entry["description"]), "", f"Source: {_text(entry['paper'])}" if entry["paper"] else "", ""]
    if entry["fields"]:
        rows = [(f"`{f['name']}`", f["type"], f"`{f['default']}`", f["description"]) for f in entry["fields"]]
        lines.append(_table(("field", "type", "default", "what it is"), rows))
    return "\n".join(line for i, line in enumerate(lines) if line or lines[i - 1])


def _command(command: Any, usage: str, level: int) -> str:
    parts = [f"{'#' * level} {usage}", _help(command.help or "")]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    rows = [
        (f"`{_metavar(p)}`", "required" if p.required else "optional", _line(getattr(p, "help", None)))
        for p in arguments
    ]
    if rows:
        parts.append(_table(("argument", "", "what it is"), rows))
    options = []
    for option in (p for p in command.params if p.param_type_name == "option" and p.name != "help"):
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
        default = option.default
        shown = (
            f"`{default}`"
            if isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != ""
            else ""
        )
        options.append((names, shown, _line(option.help)))
    if options:
        parts.append(_table(("option", "default", "what it does"), options))
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        parts.append(_command(sub, f"{usage} {name}", level + 1))
    return "\n\n".join(part for part in parts if part) + "\n"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name).upper()


def _help(text: str) -> str:
    """Paragraphs of a command's help; those after `\\b` are examples."""
    parts = []
    for paragraph in inspect.cleandoc(text.replace("\f", "")).split("\n\n"):
        if paragraph.startswith("\b"):
            lines = [line.strip() for line in paragraph.strip("\b\n").splitlines()]
            parts.append(f"**{lines[0].rstrip(':')}**\n\n```console\n" + "\n".join(lines[1:]) + "\n```")
        else:
            parts.append(_text(" ".join(paragraph.split())))
    return "\n\n".join(parts)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Tables of a pydantic model and, after it, of the models below its keys."""
    from compress.recipe.models import OPEN, TextSource

    told, fields, rows, below = _attributes(model), _schema(model), [], []
    for name, field in model.model_fields.items():
        inner = next((t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)), None)
        schema = fields.get(name, {})
        kind, text = _kind(schema), field.description or told.get(name, "")
        if inner is not None and inner is not model:
            below.append((name, inner))
            more = f"See [below](#{(prefix + name).replace('.', '').lower()})."
            # A key that takes one value or a list of entries says what the value is.
            kind, text = (kind, f"{text} {more}") if name == "data" else ("section", more)
        default = "required" if field.is_required() else _default(field)
        if name in OPEN and issubclass(model, TextSource) and field.default is not None:
            default = "`auto`"
        rows.append(
            (f"`{name}`", kind if kind != "any" else "list of stages" if name == "stages" else "", default, text)
        )
    yield f"\n## {prefix.rstrip('.') or 'Top level'}\n"
    summary = (inspect.getdoc(model) or "").split("\n\n")[0]
    yield f"{_text(summary)}\n"
    yield _table(("key", "type", "default", "what it is"), rows)
    for name, inner in below:
        yield from _sections(inner, f"{prefix}{name}.")


def _types(annotation: Any) -> Iterator[Any]:
    from typing import get_args

    yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of each key that has one (stages are read by a registry, not by pydantic)."""
    found = {}
    for name, field in model.model_fields.items():
        try:
            one = create_model("One", **{name: (field.annotation, field)})  # type: ignore[call-overload]
            found[name] = one.model_json_schema(by_alias=False)["properties"][name]
        except Exception:  # no JSON schema for this type: pydantic raises several classes
            found[name] = {}
    return found


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema or "oneOf" in schema:
        among = schema.get("anyOf") or schema["oneOf"]
        return " or ".join(dict.fromkeys(_kind(s) for s in among if s.get("type") != "null"))
    words = {
        "string": "string",
        "integer": "integer",
        "number": "number",
        "boolean": "true or false",
        "object": "mapping",
        "array": "list",
    }
    text = words.get(str(schema.get("type")), "any")
    bounds = [("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<")]
    limits = [f"{sign} {schema[key]:,}" for key, sign in bounds if key in schema and abs(schema[key]) < 2**62]
    return text + (f", {', '.join(limits)}" if limits else "")


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value, default=str)}`" if value != "" else ""


def _attributes(model: type) -> dict[str, str]:
    """Descriptions of fields from the `Attributes:` of a class's docstring and those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \w[\w, ]*: )", section.split("\n\n")[0]):
            names, _, words = entry.strip().partition(": ")
            for name in names.split(","):
                found[name.strip()] = " ".join(words.split())
    return found


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in (*row[:-1], _text(row[-1]))) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _text(text: str) -> str:
    """Prose for Markdown: angle brackets are not HTML, lists keep their lines, pages are linked from the reference."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if i % 2 else html.escape(part, quote=False).replace("*", "\\*") for i, part in enumerate(parts)
    )
