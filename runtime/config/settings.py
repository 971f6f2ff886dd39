"""One reader of configuration values, for cache policies, drafters and acceptance rules: pydantic checks, one sentence says what is wrong.

A method is a dataclass. Its fields are its settings, and their annotated types say what they hold: `observe: Count = 32`. Fields that
are no settings say where they come from: `calibrated()`, `built()`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from runtime.config.field_types import choices_of, describe_type
from runtime.config.messages import did_you_mean, show
from runtime.config.registry import Registry
from runtime.errors import RequestError
from runtime.system.describe import is_integer

Path = tuple[str | int, ...]
_SOURCE = "source"  # in a field's metadata
_LARGEST = 2**31 - 1


def is_off(value: Any) -> bool:
    """Whether an option that may name a method asks for none: False, "none", "off"."""
    return value is False or (isinstance(value, str) and value.lower() in ("none", "off"))


def _is_odd(value: int) -> bool:
    return value % 2 == 1


Natural = Annotated[int, Ge(0)]
Count = Annotated[int, Ge(1)]
OddCount = Annotated[int, Ge(1), Predicate(_is_odd)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
#: A part of a whole that may be all of it, but not nothing.
Share = Annotated[float, Gt(0), Le(1)]
#: Nothing and all included.
Fraction = Annotated[float, Ge(0), Le(1)]
#: From 0, below 1.
Probability = Annotated[float, Ge(0), Lt(1)]
Text = Annotated[str, MinLen(1)]


class ConfigError(RequestError):
    """A configuration that cannot be: `text` says why, `path` is the key it is about, `where` what the whole is called."""

    def __init__(self, path: Path, text: str, where: str = "") -> None:
        self.path, self.text = path, text
        place = written(where, path)
        super().__init__(f"{place}: {text}" if place else text)

    def at(self, where: str) -> ConfigError:
        """The same about a configuration of another name."""
        return type(self)(self.path, self.text, where)

    def within(self, *path: str | int) -> ConfigError:
        """The same about a configuration that stands at `path` of another one."""
        return type(self)((*path, *self.path), self.text)


def written(where: str, path: Path) -> str:
    """A key as it is written in Python: "drafter.of[1].longest"."""
    return (where + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)).removeprefix(".")


def unknown(path: Path, word: Any, names: Iterable[str], what: str) -> ConfigError:
    """The error for a name that there is none of."""
    names = list(names)
    text = f"unknown {what} {show(word)}{did_you_mean(word, names) or '.'} Allowed: {', '.join(names)}"
    return ConfigError(path, text)


# ---------------------------------------------------------------- values
def read(kind: Any, value: Any, path: Path = ()) -> Any:
    """A value of an annotated type: `Count`, `Share | None`, `tuple[int, ...]`, a Literal.

    Integers may come as whole floats or as numpy's, tuples as lists; nothing else is converted.

    Raises:
        ConfigError: it is none, with the place in a list.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
    places = tuple(key for key in problem["loc"] if isinstance(key, int))
    for _ in places:
        kind = _element(kind)
    found = problem["input"]
    hint = did_you_mean(found, choices_of(kind)) if isinstance(found, str) else ""
    raise ConfigError((*path, *places), f"expected {describe_type(kind)}, got {show(found)}{hint}")


def mapping(path: Path, value: Any, keys: Iterable[str], what: str = "a mapping") -> dict[str, Any]:
    """A mapping with none but these keys."""
    keys = list(keys)
    if not isinstance(value, Mapping):
        raise ConfigError(path, f"expected {what} ({', '.join(keys)}), got {show(value)}")
    for key in value:
        if not isinstance(key, str) or key not in keys:
            raise unknown((*path, str(key)), key, keys, "key")
    return dict(value)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(kind), config=ConfigDict(strict=True))


def _strict(kind: Any) -> Any:
    """The type with the few conversions that `read` makes."""
    origin, parts = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        return Annotated[(_strict(kind.__origin__), *kind.__metadata__)]
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, (_strict(part) for part in parts))
    if origin is tuple:
        inner: Any = tuple(part if part is Ellipsis else _strict(part) for part in parts)
        return Annotated[tuple.__class_getitem__(inner), BeforeValidator(_as_tuple)]
    if kind is int:
        return Annotated[int, BeforeValidator(_as_integer)]
    if kind is float:
        return Annotated[float, BeforeValidator(_as_number), AllowInfNan(False)]
    return kind


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_integer(value: Any) -> Any:
    if is_integer(value) or (isinstance(value, float) and value.is_integer()):
        if abs(value) > _LARGEST:
            raise ValueError("too large")
        return int(value)
    return value


def _as_number(value: Any) -> Any:
    if is_integer(value) and abs(value) <= _LARGEST:
        return float(value)
    return value


def _element(kind: Any) -> Any:
    """What the lists of a type hold."""
    if hasattr(kind, "__metadata__"):
        return _element(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        return next(_element(part) for part in get_args(kind) if get_origin(part) is tuple)
    return get_args(kind)[0]


# ---------------------------------------------------------------- fields of a method
class Setting(NamedTuple):
    """One field that a configuration may give.

    Attributes:
        kind: its type, annotated with what it holds.
        default: MISSING (of dataclasses): it must be given.
        is_method: it is a method itself, of a registry that its reader knows.
    """

    name: str
    kind: Any
    default: Any
    is_method: bool

    @property
    def is_number(self) -> bool:
        """Whether the setting takes an int or a float."""
        parts = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        return bool({getattr(part, "__origin__", part) for part in parts} & {int, float})


def built(default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """A dataclass's field that whoever builds the method fills in; no configuration does."""
    return dataclasses.field(default=default, metadata={_SOURCE: "build"}, **options)


def calibrated(unknown: Any, per_head: bool = False) -> Any:
    """A dataclass's field that calibration fills in. Configurations have it under their key `calibrated`.

    Args:
        unknown: stands in for it as long as it was not calibrated, for questions about other fields.
        per_head: it is a table `[layers][key heads]`, of the layers whose cache is compressed; entries may be tables.
    """
    return dataclasses.field(default=unknown, metadata={_SOURCE: "calibration", "per_head": per_head})


def nested(default: Any = dataclasses.MISSING) -> Any:
    """A dataclass's field that is a method of a registry itself."""
    return dataclasses.field(default=default, metadata={"method": True})


def settings_of(cls: Any, fixed: Iterable[str] = ()) -> dict[str, Setting]:
    """What a configuration may give of a method: its fields but those that its name fixes, calibration finds or a builder fills in."""
    hidden = set(fixed)
    return {name: setting for name, setting in _settings(cls).items() if name not in hidden}


@cache
def _settings(cls: Any) -> dict[str, Setting]:
    return {
        field.name: Setting(field.name, kind_of(cls, field), field.default, "method" in field.metadata)
        for field in (dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ())
        if field.init and _SOURCE not in field.metadata
    }


class Calibration(NamedTuple):
    """A field that calibration fills in; see `calibrated`."""

    name: str
    kind: Any
    per_head: bool


def calibrations_of(cls: Any) -> dict[str, Calibration]:
    """Fields of a method that calibration fills in."""
    return {
        field.name: Calibration(field.name, kind_of(cls, field), field.metadata["per_head"])
        for field in (dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ())
        if field.metadata.get(_SOURCE) == "calibration"
    }


def kind_of(cls: type, field: dataclasses.Field[Any]) -> Any:
    """A field's type."""
    if not isinstance(field.type, str):
        return field.type
    owner = next(base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", ()))
    return eval(field.type, vars(sys.modules[owner.__module__]))


class Settings:
    """Base of a method's dataclass: numbers are checked when it is made, whoever makes it."""

    def __post_init__(self) -> None:
        check_numbers(self)


def check_numbers(method: Any) -> None:
    """For a dataclass's `__post_init__`.

    Raises:
        ValueError: a number is not what its field holds, in one sentence.
    """
    for name, setting in settings_of(type(method)).items():
        if not setting.is_number:
            continue
        try:
            read(setting.kind, getattr(method, name))
        except ConfigError as error:
            where = f"{getattr(method, 'name', type(method).__name__)}.{name}"
            raise ValueError(
                f"{where} {error.text.replace('expected', 'must be', 1).replace(', got', ', not', 1)}"
            ) from None


def read_settings(
    cls: Any,
    given: Any,
    path: Path = (),
    fixed: Iterable[str] = (),
    beside: Iterable[str] = (),
    methods: Callable[[Path, Any], Any] | None = None,
) -> dict[str, Any]:
    """Values of all settings of a method, defaults where nothing is given.

    Args:
        given: settings by name.
        path: where they stand.
        fixed: fields that the method's name gives.
        beside: keys that are read elsewhere, for messages.
        methods: reads settings that are methods themselves.

    Raises:
        ConfigError: an unknown key, a wrong value, a missing one.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(path, f"expected a mapping of settings, got {show(given)}")
    settings, found = settings_of(cls, fixed), {}
    for key in given:
        if key in calibrations_of(cls):
            raise ConfigError((*path, key), f"{key} are found by calibration (`compress apply`), not written by hand")
        if key not in settings:
            raise unknown((*path, str(key)), key, [*beside, *settings] or ["none"], "key")
    for name, setting in settings.items():
        if name in given:
            here, value = (*path, name), given[name]
            if not setting.is_method:
                found[name] = read(setting.kind, value, here)
            else:
                assert methods is not None, f"{name} is a method of a registry, which its reader must know"
                found[name] = None if value is None else methods(here, value)
        elif setting.default is not dataclasses.MISSING:
            found[name] = setting.default
        else:
            raise ConfigError(path, f"the key '{name}' is missing")
    return found


def configure(
    cls: Any,
    given: Any,
    path: Path = (),
    fixed: Mapping[str, Any] | None = None,
    beside: Iterable[str] = (),
    methods: Callable[[Path, Any], Any] | None = None,
) -> Any:
    """A dataclass with these settings, as `read_settings` takes them; ConfigError where they cannot be."""
    fixed = fixed or {}
    values = read_settings(cls, given, path, fixed, beside, methods)
    try:
        return cls(**fixed, **values)
    except ConfigError as error:
        raise error.within(*path) from error
    except ValueError as error:
        raise ConfigError(path, str(error)) from error


def read_method(registry: Registry, value: Any, path: Path = ()) -> Any:
    """A method of a registry from its name or {name: settings}; ConfigError where there is none such."""
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        names = ", ".join(registry.names)
        raise ConfigError(path, f"expected one of {names}, or a mapping of one to its settings, got {show(value)}")
    ((name, given),) = value.items()
    found = registry.find(name)
    if found is None:
        raise unknown(path, name, registry.names, registry.what)
    return configure(found.load(), given or {}, (*path, found.name), found.fixed)
