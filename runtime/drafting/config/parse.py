"""What `drafter=` says, held against the names, keys and directories that there are: all that can be told without the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runtime.config.fields import Path as FieldPath
from runtime.config.fields import PolicyError, found, read_fields, unknown
from runtime.config.registry import Method, Table
from runtime.drafting.config.amounts import OF_THE_WHOLE
from runtime.drafting.config.registry import COMPOSITIONS, FREE, GIVEN, GIVEN_COMPOSED, HEADS, MODELS, SELF, names
from runtime.drafting.drafters.base import Drafter

_KEYS: tuple[str, ...] = ("method", "model", "of", *OF_THE_WHOLE)  # beside the settings of the method


def check(value: Any, path: FieldPath = ()) -> None:
    """PolicyError where no model could be drafted for so.

    Args:
        value: what `drafter=` was given, if it is not None or False. path: where it stands.
    """
    if isinstance(value, (list, tuple)):
        _check_parts(value, path)
    elif isinstance(value, Mapping):
        _check_settings(value, path)
    elif isinstance(value, (str, Path)):
        _check_name(str(value), path)
    elif value is not True and not isinstance(value, Drafter):
        expected = f"expected a name ({', '.join(names())}), a directory, settings or a list of these"
        raise PolicyError(path, f"{expected}, got {found(value)}")


def find(table: Table, name: Any) -> Method | None:
    """The method of a table that has a name, which may be anything."""
    return table.find(name) if isinstance(name, str) else None


def settings_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a mapping says of the method alone."""
    return {key: each for key, each in value.items() if key not in _KEYS}


def read_settings(method: Method, value: Mapping[str, Any], given: Iterable[str], path: FieldPath = ()) -> Any:
    """Values of a method's fields; PolicyError where one cannot be.

    Args:
        given: fields that are no settings.
    """
    keys = [key for key in _KEYS if key in ("method", *OF_THE_WHOLE) or key in value]
    return read_fields(method.load(), settings_of(value), path, (*given, *method.fixed), _nothing, keys)


def _check_name(name: str, path: FieldPath) -> None:
    if FREE.find(name) or SELF.find(name) or (name and Path(name).is_dir()):
        return
    if MODELS.find(name) or HEADS.find(name):
        whole = f'{{"model": DIRECTORY, "method": "{name}"}}'
        raise PolicyError(path, f"'{name}' drafts with a model: {whole}, with true for the artifact's own draft")
    if COMPOSITIONS.find(name):
        raise PolicyError(path, f'\'{name}\' is made of other drafters: {{"of": [...], "method": "{name}"}}')
    error = unknown(path, name, [*FREE.names, *SELF.names], "drafter")
    raise PolicyError(path, f"{error.text}; or the directory of a draft model")


def _check_settings(value: Mapping[str, Any], path: FieldPath) -> None:
    if "of" in value:
        _check_composition(value, path)
    elif "model" in value:
        _check_model(value, path)
    elif value.get("method") is None:
        raise PolicyError(
            path, f"expected one of the keys method, model and of, got {', '.join(map(str, value)) or 'none'}"
        )
    else:
        name = value["method"]
        method = find(FREE, name)
        if method is not None:
            read_settings(method, value, (), path)
        elif find(MODELS, name) or find(HEADS, name):
            text = f"the key is missing: '{name}' drafts with a model, whose directory it is"
            raise PolicyError((*path, "model"), text)
        elif find(COMPOSITIONS, name):
            raise PolicyError((*path, "of"), f"the key is missing: '{name}' is made of the drafters that it lists")
        elif find(SELF, name) is None:
            raise unknown((*path, "method"), name, names(), "drafter")


def _check_model(value: Mapping[str, Any], path: FieldPath) -> None:
    model, name = value["model"], value.get("method")
    if model is not True and not Path(str(model)).is_dir():
        raise PolicyError((*path, "model"), f"there is no directory {str(model)!r}")
    method = find(MODELS, name)
    if method is not None:
        read_settings(method, value, GIVEN, path)
    elif "method" in value and find(HEADS, name) is None:
        raise unknown((*path, "method"), name, MODELS.names, "drafter with a model")


def _check_composition(value: Mapping[str, Any], path: FieldPath) -> None:
    name = value.get("method", "first")
    method = find(COMPOSITIONS, name)
    if method is None:
        raise unknown((*path, "method"), name, COMPOSITIONS.names, COMPOSITIONS.what)
    if "model" in value:
        raise PolicyError((*path, "model"), "a composition has no model of its own; name it in the list 'of'")
    read_settings(method, value, GIVEN_COMPOSED, path)
    _check_parts(value["of"], (*path, "of"))


def _check_parts(values: Any, path: FieldPath) -> None:
    if not isinstance(values, (list, tuple)) or len(values) < 2:
        raise PolicyError(path, f"expected a list of two drafters or more, got {found(values)}")
    for place, value in enumerate(values):
        here = (*path, place)
        key = next((key for key in OF_THE_WHOLE if key in value), None) if isinstance(value, Mapping) else None
        if key is not None:
            shown = repr(value[key]) if isinstance(value[key], (str, int, float)) else "..."
            text = f"it is said of the whole, not of a part: {{'of': [...], '{key}': {shown}}}"
            raise PolicyError((*here, key), text)
        check(value, here)


def _nothing(path: Any, value: Any) -> Any:
    raise PolicyError(path, f"expected a setting, got {found(value)}")
