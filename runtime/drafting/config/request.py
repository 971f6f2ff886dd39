"""Drafters as `drafter=` asks for them: names, settings, directories, compositions; checked as far as no model is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from runtime.config.messages import show
from runtime.config.registry import Method
from runtime.config.settings import ConfigError, Path, read_settings, unknown
from runtime.drafting.config.registry import DRAFTERS, drafters, find_drafter
from runtime.drafting.drafters.base import Drafter

AMOUNT = ("nodes", "depth", "lengths")
#: Keys of a drafter, or of a whole composition, that are about none of its methods.
OF_THE_WHOLE = (*AMOUNT, "acceptance")
_KEYS = ("method", "model", "of")  # beside the settings of the method


@dataclass(frozen=True)
class Request:
    """One drafter.

    Attributes:
        path: where it was written.
        method: by its name; None: what its directory says.
        settings: of the method, as they were written.
        model: directory of a draft model or of heads; True: the artifact's own; None: it needs none.
        parts: that it is composed of.
        drafter: one of the caller's own.
        keys: that were written; a fault of another key is one of the whole.
    """

    path: Path
    method: Method | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str | bool | None = None
    parts: tuple[Request, ...] = ()
    drafter: Drafter | None = None
    keys: frozenset[str] = frozenset()

    @property
    def is_own(self) -> bool:
        """Whether it is the artifact's own draft as a whole."""
        return self.model is True and not self.keys

    def read_settings(self, method: Method) -> dict[str, Any]:
        """Values of the method's settings; ConfigError, with its path in the request, where one cannot be."""
        beside = [key for key in (*_KEYS, *OF_THE_WHOLE) if key == "method" or key in OF_THE_WHOLE or key in self.keys]
        return read_settings(method.load(), self.settings, (), method.fixed, beside)


def parse(value: Any, path: Path = ()) -> Request:
    """What `drafter=` was given, if it is not None or False.

    Raises:
        ConfigError: no model could be drafted for so.
    """
    if isinstance(value, Drafter):
        return Request(path, drafter=value)
    if value is True:
        return Request(path, model=True)
    if isinstance(value, (list, tuple)):
        return _composition(value, {}, path, path)
    if isinstance(value, (str, FilePath)):
        return _named(str(value), path)
    if not isinstance(value, Mapping):
        names = ", ".join(method.name for method in drafters("text", "target", "model"))
        expected = f"expected a name ({names}), a directory, settings or a list of these"
        raise ConfigError(path, f"{expected}, got {show(value)}")
    if "of" in value:
        return _composition(value["of"], value, path, (*path, "of"))
    return _settled(value, path)


def _named(name: str, path: Path) -> Request:
    method = DRAFTERS.find(name)
    source = None if method is None else method.load().source
    if source in ("text", "target"):
        return Request(path, method)
    if name and FilePath(name).is_dir():
        return Request(path, model=name)
    if source == "drafters":
        raise ConfigError(path, f'\'{name}\' is made of other drafters: {{"of": [...], "method": "{name}"}}')
    if source is not None:
        whole = f'{{"model": DIRECTORY, "method": "{name}"}}'
        raise ConfigError(path, f"'{name}' drafts with a model: {whole}, with true for the artifact's own draft")
    error = unknown(path, name, [method.name for method in drafters("text", "target")], "drafter")
    raise ConfigError(path, f"{error.text}; or the directory of a draft model")


def _settled(value: Mapping[str, Any], path: Path) -> Request:
    """A drafter of a mapping: a method's name, or a model's directory, and settings."""
    name, model = value.get("method"), value.get("model")
    if "model" in value and model is not True and not FilePath(str(model)).is_dir():
        raise ConfigError((*path, "model"), f"there is no directory {str(model)!r}")
    method = find_drafter(name, *(("model", "heads") if "model" in value else ("text", "target")))
    if (method is None and name is not None) or ("method" in value and name is None and "model" in value):
        raise _wrong_method(name, "model" in value, path)
    if method is None and "model" not in value:
        keys = ", ".join(map(str, value)) or "none"
        raise ConfigError(path, f"expected one of the keys method, model and of, got {keys}")
    request = _request(value, path, method, model if model is True or model is None else str(model))
    if method is not None and method.load().source in ("text", "target", "model"):
        _check_settings(request, method)
    return request


def _wrong_method(name: Any, with_model: bool, path: Path) -> ConfigError:
    if with_model:
        return unknown((*path, "method"), name, [method.name for method in drafters("model")], "drafter with a model")
    if find_drafter(name, "drafters"):
        return ConfigError((*path, "of"), f"the key is missing: '{name}' is made of the drafters that it lists")
    if find_drafter(name, "model", "heads"):
        return ConfigError((*path, "model"), f"the key is missing: '{name}' drafts with a model, whose directory it is")
    names = [method.name for method in drafters("text", "target", "model")]
    return unknown((*path, "method"), name, names, "drafter")


def _composition(values: Any, given: Mapping[str, Any], path: Path, place: Path) -> Request:
    """Drafters of a list, which stands at `place`; `given` is the mapping that it stands in, if any."""
    name = given.get("method", "first")
    method = find_drafter(name, "drafters")
    if method is None:
        names = [method.name for method in drafters("drafters")]
        raise unknown((*path, "method"), name, names, "way to compose drafters")
    if "model" in given:
        raise ConfigError((*path, "model"), "a composition has no model of its own; name it in the list 'of'")
    request = _request(given, path, method)
    _check_settings(request, method)
    if not isinstance(values, (list, tuple)) or len(values) < 2:
        raise ConfigError(place, f"expected a list of two drafters or more, got {show(values)}")
    return replace(request, parts=tuple(_part(value, (*place, index)) for index, value in enumerate(values)))


def _part(value: Any, path: Path) -> Request:
    key = next((key for key in OF_THE_WHOLE if key in value), None) if isinstance(value, Mapping) else None
    if key is not None:
        shown = repr(value[key]) if isinstance(value[key], (str, int, float)) else "..."
        text = f"it is said of the whole, not of a part: {{'of': [...], '{key}': {shown}}}"
        raise ConfigError((*path, key), text)
    return parse(value, path)


def _request(value: Mapping[str, Any], path: Path, method: Method | None, model: str | bool | None = None) -> Request:
    settings = {key: each for key, each in value.items() if key not in (*_KEYS, *OF_THE_WHOLE)}
    return Request(path, method, settings, model, keys=frozenset(map(str, value)))


def _check_settings(request: Request, method: Method) -> None:
    try:
        request.read_settings(method)
    except ConfigError as error:
        raise error.within(*request.path) from None
