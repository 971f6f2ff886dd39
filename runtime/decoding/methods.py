"""Names of drafters, acceptance rules and length policies: each is a dataclass whose fields are its settings.

A new one is one file in its folder and one line in its table. Files are imported when their name is used, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.kv_cache.methods import Method, Table
from runtime.kv_cache.policy_fields import Path, PolicyError, found, read_fields, unknown

RULES = Table(
    "acceptance",
    Method("exact", "runtime.decoding.verify.exact:Exact"),
    Method("typical", "runtime.decoding.verify.typical:Typical"),
    Method("rollback", "runtime.decoding.verify.rollback:Rollback"),
    Method("lenient", "runtime.decoding.verify.lenient:Lenient"),
)
LENGTHS = Table(
    "lengths",
    Method("goodput", "runtime.decoding.lengths.goodput:Goodput"),
    Method("fixed", "runtime.decoding.lengths.fixed:Fixed"),
)


def read_method(table: Table, value: Any, path: Path = ()) -> Any:
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


def configured(method: Method, fields: Any, path: Path) -> Any:
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


def _no_scores(path: Path, value: Any) -> Any:
    raise PolicyError(path, f"expected a setting, got {found(value)}")
