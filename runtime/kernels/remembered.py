"""Files that remember measured choices: `{"version": ..., "choices": {key: choice}}`, read again before each write.

A file that is damaged is ignored and replaced, one that cannot be written is done without; either is said once in the log.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TypeVar

from runtime.cache_directory import cache_directory

VERSION = 1
_log = logging.getLogger("compress.kernels")
_complained: set[tuple[Path, str]] = set()

Kind = TypeVar("Kind", str, dict)


def file(device: str) -> Path:
    """What was measured on one device."""
    return cache_directory("tuning") / f"{device}.json"


def read(path: Path, kind: type[Kind]) -> dict[str, Kind]:
    """What a file remembers, choices of type `kind`; nothing when it is missing, of another version or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _complain(path, "ignoring the tuning file %s, it cannot be read: %s", path, error)
        return {}
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != VERSION:
        return {}
    choices = content.get("choices") if version == VERSION else None
    if not isinstance(choices, dict) or not all(isinstance(value, kind) for value in choices.values()):
        _complain(path, "ignoring the tuning file %s, it does not hold choices", path)
        return {}
    return choices


def store(path: Path, key: str, choice: Kind) -> None:
    """Add one choice: read again (another process may have written), then replace the file in one step."""
    content = {"version": VERSION, "choices": read(path, type(choice)) | {key: choice}}
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _complain(path, "cannot remember tuning results in %s: %s", path, error)


def _complain(path: Path, message: str, *details: object) -> None:
    """Once a file and kind of trouble: a read-only home is no reason to fail, or to repeat oneself for every layer."""
    if (path, message) not in _complained:
        _complained.add((path, message))
        _log.warning(message, *details)
