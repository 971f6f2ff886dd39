"""Directories of what can be made again: one a kind under `$COMPRESS_CACHE` or `~/.cache/compress`."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """The directory of one kind ("native", "tuning", "prepared"), which may not exist yet; without a home a temporary one."""
    home = lasting()
    return (temporary() if home is None else home) / kind


def lasting() -> Path | None:
    """The directory of all kinds that later processes find again; None where there is no home to have one in."""
    chosen = os.environ.get("COMPRESS_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress"
    except RuntimeError:
        return None


def sync(path: Path) -> None:
    """Make a file, or the entries of a directory, survive a power cut.

    Raises:
        OSError: it cannot be written; of directories that a filesystem cannot sync nothing is said.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@cache
def temporary() -> Path:
    """A directory of this process and user alone, gone when the process ends: what others could write to is never loaded."""
    directory, owner = tempfile.mkdtemp(prefix="compress-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and not a fork of it
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return Path(directory)


# Who may read what is written.


def let_others_read(path: Path) -> None:
    """A file that was made for its owner only (safetensors does) gets the rights that new files have here."""
    mask = os.umask(0o077)
    os.umask(mask)
    if not path.stat().st_mode & 0o077:
        path.chmod(0o666 & ~mask)


# A directory that takes the place of another one, of which always one is there whole.


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
