"""Listing of drafters, acceptance rules and length policies for `compress methods`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from compress.commands.methods import fields_of, summary_of
from runtime.config.registry import Method, Table
from runtime.drafting.config.registry import (
    COMPOSITIONS,
    FREE,
    GIVEN,
    GIVEN_COMPOSED,
    GIVEN_HEADS,
    HEADS,
    LENGTHS,
    MODELS,
    RULES,
    SELF,
)

STAGE = "drafter"


class _Kind(NamedTuple):
    """Methods that are written alike.

    Attributes:
        table: of them. written: as in `drafter=`, with their name for NAME.
        hidden: fields that are no settings.
        key: of the drafter's that says it; empty: it is the drafter.
    """

    table: Table
    written: str
    hidden: tuple[str, ...] = ()
    key: str = ""

    @property
    def stage(self) -> str:
        return f"{STAGE} {self.key}".strip()


_KINDS = (
    _Kind(FREE, "{method: NAME}"),
    _Kind(SELF, "{method: NAME}", GIVEN),
    _Kind(MODELS, "{model: DIRECTORY, method: NAME}", GIVEN),
    _Kind(HEADS, "{model: DIRECTORY}", (*GIVEN, *GIVEN_HEADS)),
    _Kind(COMPOSITIONS, "{of: [DRAFTER, DRAFTER, ...], method: NAME}", GIVEN_COMPOSED),
    _Kind(RULES, "{..., acceptance: {NAME: {}}}", key="acceptance"),
    _Kind(LENGTHS, "{..., lengths: {NAME: {}}}", key="lengths"),
)


def listed() -> Iterator[dict[str, str]]:
    """Name, stage and summary of everything that `drafter=` may name."""
    for kind in _KINDS:
        for method in kind.table:
            yield {"name": method.name, "stage": kind.stage, "summary": _summary(method.load())}


def described(name: str) -> list[dict[str, Any]]:
    """Everything of that name in full: how it is written, description, paper, fields."""
    return [_describe(kind, method) for kind in _KINDS for method in kind.table if method.name == name]


def _describe(kind: _Kind, method: Method) -> dict[str, Any]:
    cls = method.load()
    text = re.split(r"\n\s*Attributes:", inspect.getdoc(cls) or "")[0].strip()
    description, _, source = text.partition("\n\nSource: ")
    inline = re.search(r"\(([^()]*arXiv[^()]*)\)", description)
    paper = re.split(r"(?<=\d)\.\s+(?=[A-Z])", source)[0] or (inline[1] if inline else "none")
    beside = (
        "" if kind.key else "\n\nEvery drafter also takes depth, nodes, lengths and acceptance (docs/guides/draft.md)."
    )
    return {
        "name": method.name,
        "stage": kind.stage,
        "written": f"{STAGE}: {kind.written.replace('NAME', method.name)}",
        "summary": _summary(cls),
        "description": description + beside,
        "paper": " ".join(paper.split()).rstrip("."),
        "needs": [],
        "fields": _fields(kind, method, cls),
    }


def _fields(kind: _Kind, method: Method, cls: Any) -> list[dict[str, Any]]:
    found = fields_of(cls, (*kind.hidden, *method.fixed))
    if kind.table is SELF and method.name == "early-exit":
        from runtime.drafting.drafters.early_exit import DynamicExit

        for entry in found:
            if entry["name"] == "layer":
                entry |= {"type": f"{entry['type']}, or auto: chosen anew for every draft", "default": "auto"}
        known = {entry["name"] for entry in found}
        for entry in fields_of(DynamicExit, kind.hidden):
            if entry["name"] not in known:
                found.append(entry | {"description": f"With auto: {entry['description']}"})
    return found


def _summary(cls: Any) -> str:
    return re.split(r"\. (?=[A-Z])", summary_of(cls))[0]
