"""Recipe of a sweep, before and after values are put into it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.recipe.models import Recipe
from compress.recipe.origin import Origin
from compress.recipe.overrides import assign
from compress.recipe.reading import build

_IDLE = ("name", "description", "output", "sample")
"""Keys of a recipe that do not change a trial's result."""


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
        """SHA-256 (hex) of the keys that change a trial's result."""
        counts = {key: value for key, value in self.data.items() if key not in _IDLE}
        return hashlib.sha256(json.dumps(counts, sort_keys=True, default=str).encode()).hexdigest()

    def to_plain(self) -> dict[str, Any]:
        """JSON-able data from which `from_plain` builds the same in another process."""
        file = None if self.origin.file is None else str(self.origin.file.absolute())
        overrides = [[list(path), text] for path, text in self.origin.overrides.items()]
        return {"data": self.data, "file": file, "overrides": overrides, "places": self.places}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> BaseRecipe:
        """The inverse of `to_plain`."""
        file = None if plain["file"] is None else Path(plain["file"])
        overrides = {tuple(path): text for path, text in plain["overrides"]}
        return cls(dict(plain["data"]), Origin(file, {}, overrides), dict(plain["places"]))
