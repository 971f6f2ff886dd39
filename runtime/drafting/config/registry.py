"""Names of drafters, acceptance rules and length policies, each a dataclass whose fields are its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.config.fields import Path as FieldPath
from runtime.config.fields import PolicyError, found, read_fields, unknown
from runtime.config.registry import Method, Table

# Names of drafters. A new one is one file in this folder and one line here.

_HERE = "runtime.drafting.drafters"

#: Drafters that need nothing but the text.
FREE = Table(
    "drafter",
    Method("lookup", f"{_HERE}.lookup:Lookup"),
    Method("copyspec", f"{_HERE}.lookup:CopySpec", {"longest": 3, "shortest": 3}),
    Method("suffix", f"{_HERE}.suffix:Suffix"),
    Method("trie", f"{_HERE}.trie:Trie"),
    Method("recycling", f"{_HERE}.recycling:Recycling"),
    Method("hierarchy", f"{_HERE}.hierarchy:Hierarchy"),
    Method("adaptive-ngram", f"{_HERE}.adaptive_ngram:AdaptiveNgram"),
)
#: Drafters that need a draft model: {"model": directory, "method": one of these}. Those that end a branch in a way of their own have no
#: `confidence`.
MODELS = Table(
    "drafter",
    Method("chain", f"{_HERE}.model:ModelDrafter"),
    Method("dynamic-tree", f"{_HERE}.model_tree:DynamicTree", {"confidence": 0.0}),
    Method("large-tree", f"{_HERE}.model_tree:LargeTree", {"confidence": 0.0}),
    Method("staged", f"{_HERE}.staged:Staged"),
    Method("parallel", f"{_HERE}.model:Parallel"),
    Method("confident", f"{_HERE}.confident:Confident", {"confidence": 0.0}),
    Method("nested", f"{_HERE}.cascade:Cascade"),
)
#: Drafters that are a part of the target; each module has `build(target, settings)`.
SELF = Table(
    "drafter",
    Method("skip", f"{_HERE}.skip:Skip"),
    Method("early-exit", f"{_HERE}.early_exit:EarlyExit"),
)
#: Heads and adapters that a draft.json says are in its directory; each is built by a function of its own.
HEADS = Table(
    "drafter with a model",
    Method("medusa", f"{_HERE}.medusa:Medusa"),
    Method("mtp", f"{_HERE}.mtp:MTP"),
    Method("kangaroo", f"{_HERE}.kangaroo:Kangaroo"),
)
#: Drafters composed of others: {"of": [...], "method": one of these}.
COMPOSITIONS = Table(
    "way to compose drafters",
    Method("first", f"{_HERE}.first_of:FirstOf"),
    Method("merged", f"{_HERE}.first_of:Merged"),
)
#: What a draft.json has, and the method that goes with it.
OWN = {"depths": "nested", "parallel": "parallel", "accept_head": "confident"}
#: What a draft model gives its drafter, or its drafter finds by itself.
GIVEN = ("lanes", "candidates", "weights", "mask_token", "most", "models", "asked", "head")
#: What a directory of heads, and the target, give theirs.
GIVEN_HEADS = ("parts", "heads", "block", "head", "candidates", "start")
#: What a composition is made of.
GIVEN_COMPOSED = ("drafters",)
TABLES = (FREE, SELF, MODELS)


def names() -> list[str]:
    """All names, as messages list them."""
    return [name for table in TABLES for name in table.names]


# Names of drafters, acceptance rules and length policies: each is a dataclass whose fields are its settings.
#
# A new one is one file in its folder and one line in its table. Files are imported when their name is used, not before.

RULES = Table(
    "acceptance",
    Method("exact", "runtime.drafting.verify.exact:Exact"),
    Method("typical", "runtime.drafting.verify.typical:Typical"),
    Method("rollback", "runtime.drafting.verify.rollback:Rollback"),
    Method("lenient", "runtime.drafting.verify.lenient:Lenient"),
)
LENGTHS = Table(
    "lengths",
    Method("goodput", "runtime.drafting.lengths.goodput:Goodput"),
    Method("fixed", "runtime.drafting.lengths.fixed:Fixed"),
)


def read_method(table: Table, value: Any, path: FieldPath = ()) -> Any:
    """An instance of one of a table's methods.

    Args:
        value: a name, or {name: {field: value}}.
        path: where it stands.

    Raises:
        PolicyError: an unknown name or field, or a value out of its range.
    """
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        names = ", ".join(table.names)
        raise PolicyError(path, f"expected one of {names}, or a mapping of one to its settings, got {found(value)}")
    ((name, fields),) = value.items()
    method = table.find(name) if isinstance(name, str) else None
    if method is None:
        raise unknown(path, name, table.names, table.what)
    return configured(method, fields or {}, (*path, method.name))


def configured(method: Method, fields: Any, path: FieldPath) -> Any:
    """The method with these settings; PolicyError where they cannot be."""
    if not isinstance(fields, Mapping):
        raise PolicyError(path, f"expected a mapping of settings, got {found(fields)}")
    cls = method.load()
    if not hasattr(cls, "__dataclass_fields__"):
        if fields:
            raise PolicyError(path, f"it has no settings, got {found(fields)}")
        return cls()
    values = read_fields(cls, fields, path, method.fixed, _no_scores)
    try:
        return cls(**method.fixed, **values)
    except ValueError as error:
        raise PolicyError(path, str(error)) from error


def _no_scores(path: FieldPath, value: Any) -> Any:
    raise PolicyError(path, f"expected a setting, got {found(value)}")
