"""File of the pages that are no longer recent, for caches of the native engine that are offloaded to a disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from functools import cache
from pathlib import Path

import torch

from runtime.errors import CompressError


class RecordFile:
    """Records of all layers in a mapped file that has no name, so that it is gone with the pool, however the process ends.

    A layer's records are in memory while it reads them; then C forgets them (`address`), and what is left in the system's cache of files
    the system may drop. On disk it takes what was reserved.

    Args:
        directory: of the file. pages: that each layer has. width: bytes of a page. layers: how many.

    Attributes:
        records: of each layer, uint8 `[pages, width]`.
    """

    def __init__(self, directory: Path, pages: int, width: int, layers: int) -> None:
        self._directory, self._pages, self._width = directory, pages, width
        self._apart = -(-pages * width // mmap.PAGESIZE) * mmap.PAGESIZE
        self._reserved = 0
        with tempfile.NamedTemporaryFile(prefix="compress-kv-", dir=directory) as file:
            os.ftruncate(file.fileno(), max(1, self._apart * layers))
            self._map = mmap.mmap(file.fileno(), 0)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.records = [
            torch.frombuffer(self._map, dtype=torch.uint8, count=pages * width, offset=layer * self._apart).view(
                pages, -1
            )
            for layer in range(layers)
        ]

    @property
    def layer_bytes(self) -> int:
        """Of a layer's part of the mapping, whole pages of the machine."""
        return self._apart

    def reserve(self, pages: int) -> None:
        """See to it that the disk has room for the first `pages` of every layer: a full one is noticed here, not as a fault in a step.

        Raises:
            CompressError: it has not.
        """
        if pages <= self._reserved:
            return
        pages = min(self._pages, max(pages, self._reserved * 9 // 8))
        begin, size = self._reserved * self._width, (pages - self._reserved) * self._width
        try:
            for layer in range(len(self.records)):
                os.posix_fallocate(self._file, layer * self._apart + begin, size)
        except OSError as error:
            needed = len(self.records) * pages * self._width / 1e6
            raise CompressError(
                f"kv_cache: offload: {self._directory} cannot hold {needed:.1f} MB of cache: {error.strerror}"
            ) from error
        self._reserved = pages

    def forget(self) -> None:
        """Nothing of it is wanted in memory now; nothing is lost."""
        self._map.madvise(mmap.MADV_DONTNEED)


@cache
def madvise() -> int:
    """Address of the system's function."""
    return ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value or 0
