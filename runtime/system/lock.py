"""Directory lock: one writer at a time, by a lock of the kernel, which ends with its process, however that ends."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import ResourceError

LOCK = ".lock"  # in a directory that is written in place
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # what filesystems without any answer
_MOST = 4096  # bytes of a lock file that are read
_TRIES, _PAUSE = 3, 0.03  # of taking it, and the seconds between two
_log = logging.getLogger("compress")


def inside(directory: Path) -> Path:
    """The lock of a directory whose files are written one by one."""
    return directory / LOCK


def beside(directory: Path) -> Path:
    """The lock of a directory that is written beside and renamed."""
    return directory.with_name(f".{directory.name}.lock")


@contextmanager
def locked(file: Path, written: Path) -> Iterator[None]:
    """Hold a lock while `written` is written; the file is removed afterwards.

    No clock and no process number decides whether somebody holds it, so the file of a killed process blocks nobody.

    Raises:
        ResourceError: another process (or thread) holds it. OSError: the file cannot be made.
    """
    descriptor = _acquire(file, written)
    try:
        yield
    finally:
        try:
            with suppress(OSError):
                # Before it is unlocked: who opens it meanwhile finds another file there, and tries again.
                os.unlink(file)
        finally:
            os.close(descriptor)


def refuse_held(file: Path, written: Path) -> None:
    """ResourceError where somebody holds the lock; nothing is changed."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # there is none, or it is not ours to take: then `locked` says so
        return
    try:
        if not _taken(descriptor, shared=True):  # else of two that look at a time, one would be refused
            raise _refusal(descriptor, written)
    finally:
        os.close(descriptor)


def _acquire(file: Path, written: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if not _taken_soon(descriptor):
                raise _refusal(descriptor, written)
            if _is_there(file, descriptor):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _taken_soon(descriptor: int) -> bool:
    """Take the lock, if nobody has it but for those who only look at it, which takes them an instant."""
    for _ in range(_TRIES):
        if _taken(descriptor):
            return True
        time.sleep(_PAUSE)
    return _taken(descriptor)


def _taken(descriptor: int, shared: bool = False) -> bool:
    """Take the lock, if nobody has it; shared: or if others have a shared one."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("this filesystem has no locks (%s): nothing keeps a second run out of the output", error.strerror)
    return True


def _is_there(file: Path, descriptor: int) -> bool:
    """Whether the file that is held is the one of that name: its last holder may have removed it meanwhile."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _sign(descriptor: int) -> None:
    """Who holds it, for people; a full disk is no reason to fail here."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _refusal(descriptor: int, written: Path) -> ResourceError:
    try:
        holder = json.loads(os.pread(descriptor, _MOST, 0))
        who = f"process {int(holder['pid'])} on {str(holder['host'])[:64]}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return ResourceError(f"output {written} is being written by {who}; wait until that ends, or name another directory")
