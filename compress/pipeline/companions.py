"""The small files that make a checkpoint complete."""

from __future__ import annotations

import shutil
from pathlib import Path

from compress.pipeline.files import written_beside
from runtime.companions import companions


def copy_companions(source: Path, target: Path) -> None:
    """Copy them from one checkpoint directory to another."""
    for file in companions(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        with written_beside(place) as temporary:
            shutil.copyfile(file, temporary)
