"""YAML reader of recipes: plain Python data, and the line of every key.

Only what a recipe needs of YAML is accepted: mappings, lists, and the scalars of the YAML 1.2 core schema (so `2:4` is
text and `1e-3` is a number, which PyYAML's own YAML 1.1 rules get wrong). Tags are refused, duplicate keys are errors,
and depth, size and alias expansion are bounded, so a hostile or generated file answers in one sentence.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from runtime.errors import RequestError

Path = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_NODES = 20_000
MAX_DEPTH = 20
MAX_LENGTH = 1_000
MAX_STAGES = 100

_INT = re.compile(r"[-+]?[0-9]+\Z")
_BASED = re.compile(r"(0x[0-9a-fA-F]+|0o[0-7]+)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_INF = re.compile(r"([-+]?)\.(inf|Inf|INF)\Z")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None,
          "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
          ".nan": math.nan, ".NaN": math.nan, ".NAN": math.nan}  # fmt: skip


def parse(text: str, file: str) -> tuple[Any, dict[Path, int]]:
    """Parse one YAML document.

    Args:
        text: the document.
        file: its name, for messages.

    Returns:
        The data, and the 1-based line of every key and list entry by its path, for example `("stages", 0, "prune")`.

    Raises:
        RequestError: not YAML, tabs, duplicate keys, tags, several documents, or larger than a recipe may be.
    """
    if len(text) > MAX_BYTES:
        raise RequestError(f"{file}: the recipe is {len(text):,} characters long; at most {MAX_BYTES:,} are allowed")
    try:
        return _Builder(file).build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        raise RequestError(_syntax_error(error, text, file)) from None
    except yaml.YAMLError as error:
        raise RequestError(f"{file}: not YAML: {' '.join(str(error).split())}") from None


def parse_scalar(text: str) -> Any:
    """The value of an unquoted YAML 1.2 scalar: None, bool, int, float or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        # Python refuses to convert digit strings of more than a few thousand characters; such a "number" is text here.
        return int(text) if len(text) < 400 else text
    if _BASED.match(text):
        return int(text, 0) if len(text) < 400 else text
    if _FLOAT.match(text):
        return float(text)
    if _INF.match(text):
        return -math.inf if text.startswith("-") else math.inf
    return text


class _Builder:
    """Builds data from parser events, so that limits stop a huge file early."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Path, int] = {}
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.nodes = 0

    def build(self, events: Iterator[Any]) -> tuple[Any, dict[Path, int]]:
        self.events = events
        data: Any = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if self.lines:
                    raise self.error(event, "a recipe is one YAML document, but a second one starts here")
                data = self.node(next(events), ())
        return data, self.lines

    def node(self, event: Any, path: Path) -> Any:
        self.lines.setdefault(path, _line(event))
        self.count(event, 1)
        if len(path) > MAX_DEPTH:
            raise self.error(event, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event)
        self.refuse_tag(event)
        before = self.nodes
        if isinstance(event, yaml.ScalarEvent):
            value: Any = event.value if event.style in ("'", '"', "|", ">") else parse_scalar(event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(path)
        else:
            value = self.mapping(path)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - before + 1)
        return value

    def sequence(self, path: Path) -> list[Any]:
        limit = MAX_STAGES if path == ("stages",) else MAX_LENGTH
        values: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            if len(values) == limit:
                raise self.error(event, f"{dotted(path)}: more than {limit} entries; at most {limit} are allowed")
            values.append(self.node(event, (*path, len(values))))
        return values

    def mapping(self, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise self.error(event, "a key must be a plain word")
            self.refuse_tag(event)
            key = event.value
            here = (*path, key)
            if key in values:
                first = self.lines[here]
                raise self.error(event, f"{dotted(here)}: this key is already given in line {first}; give it once")
            self.lines[here] = _line(event)
            self.count(event, 1)
            values[key] = self.node(next(self.events), here)
        return values

    def refuse_tag(self, event: Any) -> None:
        if event.tag not in (None, "!"):
            text = f"the tag {event.tag!r} is not allowed; a recipe is plain mappings, lists and values"
            raise self.error(event, text)

    def alias(self, event: Any) -> Any:
        if event.anchor not in self.anchors:
            raise self.error(event, f"the alias '*{event.anchor}' names no anchor that is complete before it")
        value, size = self.anchors[event.anchor]
        self.count(event, size)
        return copy.deepcopy(value)

    def count(self, event: Any, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self.error(event, f"more than {MAX_NODES:,} values (aliases expanded), which is the most allowed")

    def error(self, event: Any, message: str) -> RequestError:
        return RequestError(f"{self.file}:{_line(event)}: {message}")


def dotted(path: Path) -> str:
    """`("stages", 1, "quantize")` as `stages.1.quantize`."""
    return ".".join(map(str, path))


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _syntax_error(error: yaml.MarkedYAMLError, text: str, file: str) -> str:
    mark: Any = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    lines = dict(enumerate(text.splitlines(), 1))
    # A tab makes the parser complain somewhere near it, in words that do not mention indentation.
    for number in (line, line - 1, line + 1):
        source = lines.get(number, "")
        if "\t" in source[: len(source) - len(source.lstrip())]:
            return f"{file}:{number}: a tab is used for indentation; YAML allows only spaces"
    if mark is not None and "\t" in lines.get(line, ""):
        return f"{file}:{line}: a tab stands where YAML allows only spaces"
    problem = " ".join(part for part in (error.context, error.problem) if part)
    return f"{file}:{line}: not YAML: {problem}"
