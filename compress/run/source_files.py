"""Hashes of the source's files: noted as a run begins, compared as it goes on, since a changed source would make another artifact."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from compress.core.files import read_sealed, sha256, write_sealed
from compress.core.run_directory import RunDirectory
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError

SOURCE_SUMS = "source.sums"  # no record of a part, which are all *.json
#: Files that are read at a time: hashing leaves the interpreter to others.
_HASHED_AT_ONCE = 2


@contextmanager
def source_files_checked(directory: RunDirectory, checkpoint: Checkpoint) -> Iterator[None]:
    """`check_source_files`; where nothing is noted yet, beside what the run does, and no part is recorded before the note is written."""
    if read_sealed(directory.work / SOURCE_SUMS) is not None:
        check_source_files(directory.work, checkpoint)
        yield
        return
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        noted = pool.submit(check_source_files, directory.work, checkpoint, stop)
        directory.before_commit = noted.result
        try:
            yield
            noted.result()
        finally:
            stop.set()


def check_source_files(work: Path, checkpoint: Checkpoint, stop: Event | None = None) -> None:
    """Note the source's files in a run's work directory, or hold them against what was noted.

    A damaged note is written again; then only the fingerprint has shown that the source is the same.

    Args:
        stop: once set, nothing is noted any more.

    Raises:
        RequestError: a file is another than when the run began. CompressError: it was stopped.
    """
    note = work / SOURCE_SUMS
    before: dict[str, Any] = (read_sealed(note) or {"files": {}})["files"]
    files = [checkpoint.path / "config.json", *checkpoint.files()]
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        found = dict(pool.map(lambda file: (file.name, _file_record(file, before.get(file.name), stop)), files))
    for name, now in found.items():
        if before and before.get(name, {}).get("sha256") != now["sha256"]:
            raise RequestError(
                f"{checkpoint.path / name} is not the file that this run began with, so it cannot go on: restore it, or name another output"
            )
    if found != before:
        write_sealed(note, {"files": found})


def _file_record(file: Path, before: dict[str, Any] | None, stop: Event | None) -> dict[str, Any]:
    """Size, time of change and hash of a file; the hash is taken over where the others are as they were."""
    status = file.stat()
    seen = {"bytes": status.st_size, "changed": status.st_mtime_ns, "inode": status.st_ino}
    if before is not None and all(before.get(key) == value for key, value in seen.items()):
        return before
    return {**seen, "sha256": sha256(file, stop)}
