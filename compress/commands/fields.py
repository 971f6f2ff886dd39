"""What `compress methods` says of a dataclass: its fields, their types and defaults, what its docstring says."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from typing import Any

from runtime.kv_cache.bounds import Range, range_of
from runtime.kv_cache.policy_fields import annotation, choices, options_of


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
