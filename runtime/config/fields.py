"""Reading values of a policy: each check names the key, what was found, what is allowed and the nearest valid name."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from runtime.config.ranges import Range, range_of
from runtime.config.registry import CALIBRATED, plain
from runtime.errors import RequestError
from runtime.system.describe import is_integer, show

Path = tuple[str | int, ...]
_MOST = 2**31 - 1


class PolicyError(RequestError):
    """A policy that cannot be: `text` says why, `path` is the key it is about, `where` what the policy is called."""

    def __init__(self, path: Path, text: str, where: str = "kv_cache") -> None:
        self.path, self.text = path, text
        super().__init__(f"{written(where, path)}: {text}")

    def at(self, where: str) -> PolicyError:
        """The same about a policy of another name."""
        return PolicyError(self.path, self.text, where)


def written(where: str, path: Path) -> str:
    """A key as it is written in Python: "drafter.of[1].longest"."""
    return where + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def unknown(path: Path, word: Any, names: Iterable[str], what: str) -> PolicyError:
    """The error for a name that there is none of."""
    names = list(names)
    by_plain = {plain(name): name for name in names}
    close = difflib.get_close_matches(plain(str(word)), list(by_plain), n=1, cutoff=0.6)
    hint = f"; did you mean '{by_plain[close[0]]}'?" if close else "."
    return PolicyError(path, f"unknown {what} {show(word)}{hint} Allowed: {', '.join(names)}")


def mapping(path: Path, value: Any, keys: Iterable[str], what: str = "a mapping") -> dict[str, Any]:
    """A mapping with none but these keys."""
    keys = list(keys)
    if not isinstance(value, Mapping):
        raise PolicyError(path, f"expected {what} ({', '.join(keys)}), got {found(value)}")
    for key in value:
        if not isinstance(key, str) or key not in keys:
            raise unknown((*path, str(key)), key, keys, "key")
    return dict(value)


def integer(path: Path, value: Any, least: int = 0) -> int:
    """A whole number from `least` to about two thousand million."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_integer(value) or not least <= value <= _MOST:
        raise PolicyError(path, f"expected an integer between {least} and {_MOST}, got {found(value)}")
    return int(value)


def number(path: Path, value: Any, within: Range) -> float:
    """A finite number."""
    if (is_integer(value) or isinstance(value, float)) and abs(value) < 1e300 and within.holds(value):
        return float(value)
    raise PolicyError(path, f"expected a number {within}, got {found(value)}")


def text(path: Path, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise PolicyError(path, f"expected a text, got {found(value)}")
    return value


def found(value: Any) -> str:
    """A value as messages name it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return show(value)


# ---------------------------------------------------------------- fields of a dataclass
def options_of(cls: type, fixed: Iterable[str] = ()) -> dict[str, dataclasses.Field[Any]]:
    """Fields that a policy may give: those that neither the name (`fixed`) nor calibration does."""
    hidden = {*fixed, *CALIBRATED}
    return {field.name: field for field in dataclasses.fields(cls) if field.name not in hidden}


def calibrated_fields(cls: type) -> list[str]:
    """Fields that calibration fills."""
    return [field.name for field in dataclasses.fields(cls) if field.name in CALIBRATED]


def read_fields(
    cls: type,
    given: Mapping[str, Any],
    path: Path,
    fixed: Iterable[str],
    scores: Callable[[Path, Any], Any],
    beside: Iterable[str] = (),
) -> dict[str, Any]:
    """Values of all fields of a dataclass that a policy may give, defaults where it does not.

    Args:
        given: what the policy says.
        path: of it.
        fixed: fields that the name gives.
        scores: reads a field that is a score itself.
        beside: keys that are read elsewhere, for messages.
    """
    fields = options_of(cls, fixed)
    for key in given:
        if key in CALIBRATED and key in calibrated_fields(cls):
            raise PolicyError((*path, key), f"{key} are found by calibration (`compress apply`), not written by hand")
        if key not in fields:
            raise unknown((*path, str(key)), key, [*beside, *fields] or ["none"], "key")
    result = {}
    for name, field in fields.items():
        if name in given:
            result[name] = _value(field, given[name], (*path, name), scores)
        elif field.default is not dataclasses.MISSING:
            result[name] = field.default
        else:
            raise PolicyError(path, f"the key '{name}' is missing")
    return result


def _value(field: dataclasses.Field[Any], value: Any, path: Path, scores: Callable[[Path, Any], Any]) -> Any:
    kinds = [kind.strip() for kind in annotation(field).split("|")]
    if value is None and "None" in kinds:
        return None
    within = range_of(field)
    allowed = choices(field)
    if allowed:
        if not isinstance(value, str) or value not in allowed:
            raise unknown(path, value, allowed, "value")
        return value
    if "tuple[int, ...]" in kinds:
        if not isinstance(value, (list, tuple)):
            raise PolicyError(path, f"expected a list of integers, got {found(value)}")
        return tuple(integer((*path, place), entry) for place, entry in enumerate(value))
    if "bool" in kinds:
        if not isinstance(value, bool):
            raise PolicyError(path, f"expected true or false, got {found(value)}")
        return value
    if "int" in kinds:
        whole = integer(path, value, int(within.low))
        if within.odd and whole % 2 == 0:
            raise PolicyError(path, f"expected an odd integer, got {whole}")
        return whole
    if "float" in kinds:
        return number(path, value, within)
    if "str" in kinds:
        return text(path, value)
    if "Score" in kinds:
        return scores(path, value)
    raise PolicyError(path, f"the field cannot be written in a policy (its type is {annotation(field)})")


def choices(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Texts that a field is one of; empty where it is something else."""
    kind = annotation(field)
    if kind == "Axis":
        return ("token", "channel")
    match = re.fullmatch(r"Literal(\[.*\])", kind)
    return tuple(ast.literal_eval(match[1])) if match else ()


def annotation(field: dataclasses.Field[Any]) -> str:
    """A field's type as it is written."""
    kind = field.type
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
