"""A directory that takes the place of another one, of which always one is there whole."""

from __future__ import annotations

import shutil
from pathlib import Path


def replace_directory(new: Path, place: Path, aside: Path) -> None:
    """Rename `new` to `place`. What is there goes to `aside` until that is done, and back where it cannot be done.

    Args:
        new, place, aside: on one filesystem. What an earlier process left at `aside` is removed.

    Raises:
        OSError: it cannot be renamed; `place` is what it was.
    """
    there = place.exists()
    if there:
        shutil.rmtree(aside, ignore_errors=True)  # only now: without `place` it may be the only whole one
        place.rename(aside)
    try:
        new.rename(place)
    except BaseException:
        if there:
            aside.rename(place)
        raise
    shutil.rmtree(aside, ignore_errors=True)
