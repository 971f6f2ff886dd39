"""The recipe of a sweep before any value is chosen, and with values."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.recipe.models import Recipe
from compress.recipe.origin import Origin
from compress.recipe.overrides import apply_overrides, assign
from compress.recipe.reading import build, find_recipe, read_file

_IDLE = ("name", "description", "output", "sample")
"""Keys of a recipe that do not change what a trial gives."""


@dataclass
class BaseRecipe:
    """Recipe data that need not be a valid recipe until values are put into it.

    Attributes:
        data: as the file has it, with what is changed for all trials.
        origin: where it was written.
        places: where the values of each varied key are written.
    """

    data: dict[str, Any]
    origin: Origin
    places: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        recipe: str | Path,
        *,
        model: tuple[str, str] | None = None,
        changes: Iterable[tuple[str, Any, str]] = (),
        set: Iterable[str] = (),
        places: Mapping[str, str] | None = None,
    ) -> BaseRecipe:
        """Read a recipe file.

        Args:
            model: replaces the recipe's, and where that was written.
            changes: (dotted key, value, where it is written).
            set: `KEY=VALUE` texts of the command line.
        """
        data, origin = read_file(find_recipe(recipe))
        if model is not None:
            data["model"], origin.overrides["model",] = model
        for key, value, place in changes:
            origin.overrides[assign(data, key.split("."), value, place)] = place
        apply_overrides(data, set, origin)
        return cls(data, origin, dict(places or {}))

    def at(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe of one trial.

        Raises:
            RequestError: the recipe refuses the values; the sentence names the place where they are written.
        """
        data, origin = copy.deepcopy(self.data), copy.deepcopy(self.origin)
        for key, value in values.items():
            place = self.places.get(key, key)
            origin.overrides[assign(data, key.split("."), copy.deepcopy(value), place)] = place
        return build(data, origin)

    def digest(self) -> str:
        """SHA-256 (hex) of all that counts."""
        counts = {key: value for key, value in self.data.items() if key not in _IDLE}
        return hashlib.sha256(json.dumps(counts, sort_keys=True, default=str).encode()).hexdigest()

    def to_plain(self) -> dict[str, Any]:
        """What another process needs to make the same recipes."""
        file = None if self.origin.file is None else str(self.origin.file.absolute())
        overrides = [[list(path), text] for path, text in self.origin.overrides.items()]
        return {"data": self.data, "file": file, "overrides": overrides, "places": self.places}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> BaseRecipe:
        file = None if plain["file"] is None else Path(plain["file"])
        overrides = {tuple(path): text for path, text in plain["overrides"]}
        return cls(dict(plain["data"]), Origin(file, {}, overrides), dict(plain["places"]))
