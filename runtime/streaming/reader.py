"""Byte ranges of a file into aligned memory, past the page cache where the file system allows it.

Weights that are read for every token would push everything else out of the page cache and be in memory twice.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from runtime.errors import ArtifactError
from runtime.streaming.file import PAGE

_HUGE = 2 << 20


class RangeReader:
    """Reads ranges whose begin and length are multiples of `PAGE`. Used by one thread at a time.

    Attributes:
        direct: whether the page cache is passed by.
        bytes, seconds: read so far, and the time that took.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes, self.seconds = 0, 0.0
        self.direct = False
        try:
            self._file = self._open()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
        self._direct_now = self.direct

    def read(self, memory: mmap.mmap, begin: int, count: int) -> None:
        """`count` bytes from `begin` on to the front of `memory`.

        Raises:
            ArtifactError: the file is too short or cannot be read.
        """
        started, done = time.perf_counter(), 0
        view = memoryview(memory)
        try:
            while done < count:
                if self.direct:
                    self._pass_by(done % PAGE == 0)
                got = os.preadv(self._file, [view[done:count]], begin + done)
                if got == 0:
                    raise ArtifactError(
                        f"{self.path} was truncated while its weights were being read; load the model again"
                    )
                done += got
            if not self._direct_now and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, begin, count, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {error.strerror or error}") from error
        finally:
            view.release()
        self.bytes += count
        self.seconds += time.perf_counter() - started

    def _pass_by(self, wanted: bool) -> None:
        """Pass the page cache by or not: what follows a read that stopped within a page can only be had through it."""
        if wanted != self._direct_now:
            import fcntl

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
            self._direct_now = wanted

    def close(self) -> None:
        """Close the file; reading is over."""
        os.close(self._file)

    def _open(self) -> int:
        flag = getattr(os, "O_DIRECT", 0)
        if flag:
            try:
                file = os.open(self.path, os.O_RDONLY | flag)
            except OSError:  # tmpfs, some network file systems
                return os.open(self.path, os.O_RDONLY)
            try:
                with aligned(PAGE) as probe:
                    os.preadv(file, [probe], 0)
                self.direct = True
                return file
            except OSError:
                os.close(file)
        return os.open(self.path, os.O_RDONLY)


def aligned(count: int) -> mmap.mmap:
    """Memory of this process that begins at a page, in huge pages where the system has them."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, max(count, 1), **flags)
    if count >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
