"""Atomic files and directories, their checksums, and one sentence for a full disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from runtime.errors import ArtifactError, CompressError
from runtime.system.directories import let_others_read, replace_directory, sync
from runtime.system.self_hash import KEY, json_is_whole, sealed_json


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; on success it is flushed to disk and renamed over `target`, on failure removed."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        yield temporary
        let_others_read(temporary)
        sync(temporary)
        os.replace(temporary, target)
        sync_directory(target.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def directory_beside(target: Path) -> Iterator[Path]:
    """Yield a new directory beside `target`; on success it is flushed to disk and takes the place of `target`, on failure removed."""
    temporary, old = (target.with_name(f".{target.name}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_directory(temporary, files=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    replace_directory(temporary, target, old)
    sync_directory(target.parent)


def write_text(target: Path, text: str) -> None:
    """Write `text` as UTF-8; the file appears whole or not at all."""
    with written_beside(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON with sorted keys and a final newline; the file appears whole or not at all."""
    write_text(target, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        ArtifactError: it holds none, or cannot be read; `advice` says what to do.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; {advice}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} holds no JSON object; {advice}")
    return value


def sha256(path: Path, stop: Event | None = None) -> str:
    """SHA-256 of a file, in hexadecimal digits; CompressError once `stop` is set."""
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if stop is not None and stop.is_set():
                raise CompressError(f"hashing {path} was stopped")
            digest.update(chunk)
    return digest.hexdigest()


def listed(path: Path, files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files below `path`, by relative name; directories are left out."""
    return {
        file.relative_to(path).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in files
        if file.is_file()
    }


def sync_directory(path: Path, files: bool = False) -> None:
    """Make the entries of a directory (and, if asked, its files) survive a power cut."""
    if files:
        for child in path.iterdir():
            if child.is_file():
                sync(child)
    with suppress(OSError):  # some filesystems cannot sync a directory; the rename is still atomic
        sync(path)


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ONLY_WRITING = (errno.EROFS, errno.EFBIG)  # reading never fails so
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full or broken disk into one sentence; everything finished before stays usable for --resume."""
    try:
        yield
    except CompressError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        # safetensors wraps the operating system's error in its own type and keeps only the text
        wrapped = _OS_ERROR.search(str(error))
        number = int(wrapped[1]) if number is None and wrapped is not None else number
        full = number in DISK_FULL or "No space left on device" in str(error) or "Disk quota exceeded" in str(error)
        if full:
            raise CompressError(f"the disk is full while {what}; free some space, then add --resume") from error
        if number in _ONLY_WRITING or wrapped is not None:
            reason = os.strerror(number) if number is not None else str(error)
            raise CompressError(f"{reason} while {what}; finished parts stay: add --resume to go on") from error
        raise


# Files that an interrupted run resumes from, with SHA-256: damage by a crash or a disk is noticed, and the file made again.


def write_sealed(file: Path, content: dict[str, Any]) -> str:
    """Write a JSON object together with a digest of itself, which is returned."""
    text = sealed_json(content)
    write_text(file, text)
    return str(json.loads(text)[KEY])


def read_sealed(file: Path) -> dict[str, Any] | None:
    """The object that `write_sealed` wrote; None where there is no such file or it is damaged."""
    if not file.is_file() or not json_is_whole(raw := file.read_bytes()):
        return None
    content: dict[str, Any] = json.loads(raw)
    del content[KEY]
    return content


_SUMS = "sha256.json"


def seal(path: Path) -> None:
    """Record the SHA-256 of a finished file (beside it), or of all files of a directory (in it)."""
    write_sealed(_seal(path), {"files": _sums(path)})


def intact(path: Path) -> bool:
    """Whether a file or directory is there as it was when it was sealed."""
    with suppress(OSError):
        return read_sealed(_seal(path)) == {"files": _sums(path)}
    return False


def last_intact(done: int, needed: Callable[[int], Iterable[Path]], warn: Callable[[str], None]) -> int:
    """The last step, at most `done`, that a run can resume from; 0, the beginning, needs nothing.

    Args:
        needed: files and directories that must be intact for a step.
    """
    while done and not all(map(intact, needed(done))):
        warn(f"the state before block {done} is damaged or gone: resuming before block {done - 1}")
        done -= 1
    return done


def _sums(path: Path) -> dict[str, str]:
    files = [file for file in path.iterdir() if file.is_file() and file.name != _SUMS] if path.is_dir() else [path]
    return {file.name: sha256(file) for file in files}


def _seal(path: Path) -> Path:
    return path / _SUMS if path.is_dir() else path.with_name(f"{path.name}.sha256")
