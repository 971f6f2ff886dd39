"""Classes with exactly the properties, methods and arguments of the real bindings."""

from __future__ import annotations

import enum
import functools
import json
from pathlib import Path
from typing import Any

LISTING: dict[str, Any] = json.loads(Path(__file__).with_name("api.json").read_text(encoding="utf-8"))


@functools.cache
def enums() -> dict[str, Any]:
    """The enumerations, members in the real order."""
    return {name: enum.IntEnum(name, members, start=0) for name, members in LISTING["enums"].items()}


class Listed:
    """An object that has what `api.json` says its class has, and nothing else. Methods do what `do_METHOD` says, by name of argument;
    properties keep what is set. Attributes of our own begin with an underscore.
    """

    _name = ""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._state: dict[str, Any] = {}
        self._start(**bind(self._name, "__init__", args, keywords))

    def _start(self, **arguments: Any) -> None:
        """What `__init__` does."""

    @classmethod
    def _make(cls, **state: Any) -> Any:
        """An instance that only TensorRT makes."""
        made = cls.__new__(cls)
        object.__setattr__(made, "_state", state)
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = LISTING["classes"][self._name]
        if name in known["properties"]:
            return self._state.get(name)
        if name in known["methods"]:
            return lambda *args, **keywords: self._call(name, args, keywords)
        raise AttributeError(f"the real {self._name} has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in LISTING["classes"][self._name]["properties"]:
            raise AttributeError(f"the real {self._name} has no property {name}")
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._state[name] = value

    def _call(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        arguments = bind(self._name, name, args, keywords)
        action = getattr(type(self), f"do_{name}", None)
        if action is None:
            raise NotImplementedError(f"the stand-in for {self._name} does not do {name}")
        return action(self, **arguments)


def bind(owner: str, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, as one of the real overloads takes them; TypeError where none does."""
    overloads = LISTING["classes"][owner]["methods"][method] or []
    for overload in overloads:
        names = [name for name, _ in overload["arguments"]]
        needed = {name for name, default in overload["arguments"] if not default}
        if len(args) > len(names) or not set(keywords) <= set(names[len(args) :]):
            continue
        arguments = dict(zip(names, args, strict=False)) | keywords
        if needed <= set(arguments):
            return arguments
    raise TypeError(f"{owner}.{method} takes none of {len(args)} arguments and {sorted(keywords)}: {overloads}")


def listed_class(name: str) -> type:
    """A class without actions."""
    return type(name, (Listed,), {"_name": name})
