"""Guard of the source files against changes during a run, which would mix two checkpoints.

A fingerprint reads samples of large files. A run that is resumed is checked by more: the SHA-256 of every file, computed when the run
begins, and again on a resume for files whose size or modification time has changed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compress.core.files import read_sealed, sha256, write_sealed
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError

NAME = "source.sums"  # no record of a part, which are all *.json
#: Files that are read at a time: hashing leaves the interpreter to others.
_AT_ONCE = 2


def check_source_files(work: Path, checkpoint: Checkpoint) -> None:
    """Note the source's files in a run's work directory, or hold them against what was noted.

    A damaged note is written again; then only the fingerprint has shown that the source is the same.

    Raises:
        RequestError: a file is another than when the run began.
    """
    note = work / NAME
    before: dict[str, Any] = (read_sealed(note) or {"files": {}})["files"]
    files = [checkpoint.path / "config.json", *checkpoint.files()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(pool.map(lambda file: (file.name, _looked_at(file, before.get(file.name))), files))
    for name, now in found.items():
        if before and before.get(name, {}).get("sha256") != now["sha256"]:
            raise RequestError(
                f"{checkpoint.path / name} is not the file that this run began with, so it cannot go on: restore it, or name another output"
            )
    if found != before:
        write_sealed(note, {"files": found})


def _looked_at(file: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """Size, time of change and hash of a file; the hash is taken over where the others are as they were."""
    status = file.stat()
    seen = {"bytes": status.st_size, "changed": status.st_mtime_ns, "inode": status.st_ino}
    if before is not None and all(before.get(key) == value for key, value in seen.items()):
        return before
    return {**seen, "sha256": sha256(file)}
