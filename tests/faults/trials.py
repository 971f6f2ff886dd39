"""One trial: the disk of a moment, damaged or not, is gone on from, and ends as an uninterrupted run does."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moments import Moments, damage
from runs import contents, make_request

import compress
from runtime.errors import CompressError


@dataclass
class Watched:
    """A run of one kind whose every moment is known.

    Attributes:
        request: the recipe. bytes: what it ends with. found: (what was about to be done, copy of the disk).
    """

    request: dict[str, Any]
    bytes: dict[str, bytes]
    found: list[tuple[str, Path]]
    operations: int

    @classmethod
    def of(cls, kind: str, room: Path, keep: int = 1, chooser: random.Random | None = None) -> Watched:
        """Run it once, in `room`; of its moments one of `keep` is kept."""
        request, output = make_request(room, kind), room / f"{kind}-straight"
        with Moments(output, room / f"{kind}-moments", keep, chooser) as moments:
            compress.apply(request, output=output, quiet=True)
        return cls(request, contents(output), moments.found, moments.operations)

    def resumed(self, number: int, place: Path, chooser: random.Random | None = None) -> tuple[str, str | None]:
        """Go on from moment `number` in `place`, damaged first where there is a `chooser`.

        Returns:
            What was done to the disk, and what is wrong with the result; None: nothing.
        """
        moment, disk = self.found[number]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(disk, place, symlinks=True)
        finished = (place / "compress.json").exists() and not (place / ".compress/run.json").exists()
        what = moment if chooser is None else f"{moment}; {damage(place, chooser)}"
        try:
            compress.apply(self.request, output=place, resume=True, quiet=True)
        except CompressError as error:
            # A finished artifact is not made again: it is checked, and what is wrong with it is said.
            return what, None if finished and chooser is not None else f"{type(error).__name__}: {error}"
        now = contents(place)
        if now != self.bytes:
            return what, f"other bytes: {sorted(k for k in {**now, **self.bytes} if now.get(k) != self.bytes.get(k))}"
        return what, None
