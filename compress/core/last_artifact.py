"""Record of the artifact that `apply` wrote last from a folder, so that `compress export` needs no name; in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from runtime.errors import RequestError
from runtime.system.directories import cache_directory

_log = logging.getLogger("compress")


def remember_artifact(artifact: Path) -> None:
    """Note that `artifact` was written from the current folder. A cache that cannot be written is no reason to fail."""
    record = _record()
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = record.with_name(f".{record.name}.{os.getpid()}.tmp")
        temporary.write_text(str(artifact.absolute()), encoding="utf-8")
        os.replace(temporary, record)
    except OSError as error:
        _log.warning("%s cannot be written (%s): `compress export` will need the artifact's name", record, error)


def last_artifact() -> str:
    """The directory that `apply` wrote last from the current folder.

    Raises:
        RequestError: none is known, or it is gone.
    """
    try:
        known = Path(_record().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"which artifact? `compress apply` wrote none from {Path.cwd()}; name one") from error
    if not known.is_absolute() or not known.is_dir():
        raise RequestError(f"{known}, which `compress apply` wrote last from here, is gone; name an artifact")
    here = Path.cwd()
    return str(known.relative_to(here) if known.is_relative_to(here) else known)


def _record() -> Path:
    folder = hashlib.sha256(str(Path.cwd()).encode()).hexdigest()[:32]
    return cache_directory("last") / folder
