"""What an interrupted run goes on from, with SHA-256: what a crash or a disk has damaged is noticed, and made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from compress.pipeline.files import sha256, write_text
from runtime.sealed import json_is_whole, sealed_json

_SUMS = "sha256.json"


def seal(path: Path) -> None:
    """Write down the SHA-256 of a file (beside it) or of all files of a directory (in it), which are all there."""
    write_text(_seal(path), sealed_json({"files": {file.name: sha256(file) for file in _files(path)}}))


def intact(path: Path) -> bool:
    """Whether a file or directory is there as it was when it was sealed."""
    with suppress(OSError, ValueError, KeyError):
        raw = _seal(path).read_bytes()
        if json_is_whole(raw):
            return bool(json.loads(raw)["files"] == {file.name: sha256(file) for file in _files(path)})
    return False


def last_intact(done: int, needed: Callable[[int], Iterable[Path]], warn: Callable[[str], None]) -> int:
    """The last step, at most `done`, that can be gone on from; 0, the beginning, needs nothing.

    Args:
        needed: what must be intact for a step.
    """
    while done and not all(map(intact, needed(done))):
        warn(f"what block {done} would go on from is damaged or gone: going back to what is before block {done - 1}")
        done -= 1
    return done


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.name != _SUMS)


def _seal(path: Path) -> Path:
    return path / _SUMS if path.is_dir() else path.with_name(f"{path.name}.sha256")
