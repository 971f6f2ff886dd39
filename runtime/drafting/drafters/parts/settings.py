"""Settings of drafters that are built from a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.config.fields import PolicyError, found, read_fields

#: Of every drafter, read elsewhere.
_BESIDE = ("method", "model", "nodes", "depth", "lengths", "acceptance")


def read_settings(cls: type, settings: Mapping[str, Any], built: Sequence[str]) -> dict[str, Any]:
    """Values of a drafter's fields, defaults where nothing is given; PolicyError where one is wrong.

    Args:
        settings: by name; what all drafters have is left out.
        built: fields that come out of the directory.
    """
    given = {key: value for key, value in settings.items() if key not in _BESIDE}
    return read_fields(cls, given, (), built, _nothing, _BESIDE)


def _nothing(path: Any, value: Any) -> Any:
    raise PolicyError(path, f"expected a setting, got {found(value)}")
