"""Older tokens away from where attention computes: in the host's memory, or in a file on disk; fetched before their layer's turn."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from runtime.config.settings import ConfigError, Text
from runtime.errors import CompressError
from runtime.kv_cache.pages import PAGE
from runtime.kv_cache.region import Chosen, Region

_WILL_NEED, _DO_NOT_NEED = 3, 4  # of madvise


@dataclass(frozen=True)
class OffloadPlan:
    """Where tokens lie once they are no longer recent.

    Attributes:
        to: "host": memory of the machine (pinned, for caches of a GPU). "disk": files that have no name, so that they are gone with
            the cache, however the process ends; for caches of a CPU.
        directory: of the files; None: the system's for temporary files.
    """

    to: Literal["host", "disk"] = "host"
    directory: Text | None = None

    def __post_init__(self) -> None:
        if self.directory is not None and self.to != "disk":
            raise ConfigError(("directory",), "a directory is for offload to disk")

    def resolved(self) -> Any:
        """As it is written."""
        return self.to if self.directory is None else {"to": self.to, "directory": self.directory}

    def begin(self, device: torch.device) -> Offload:
        """For one new cache, whose attention computes on `device`.

        Raises:
            ValueError: that kind of device does not go with it, or the directory cannot be written.
        """
        if self.to == "host":
            if device.type != "cuda":
                raise ValueError(
                    f"offload: host is for caches of a GPU; on {device.type} they are in the host's memory already: "
                    "offload to disk, or leave offload out"
                )
            return HostOffload(device)
        if device.type != "cpu":
            raise ValueError(f"offload: disk is for caches of a CPU; on {device.type} offload to host")
        return DiskOffload(Path(self.directory or tempfile.gettempdir()))


class Offload(ABC):
    """Place of the pools of one cache's older tokens, and what must happen around their use."""

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of a pool."""

    @abstractmethod
    def fetch(self, regions: list[Region]) -> None:
        """Start to fetch whole regions; returns at once."""

    def fetched(self, regions: list[Region], chosen: list[Chosen | None]) -> list[Region]:
        """The regions where attention can read them, waiting for what `fetch` began.

        Args:
            regions: the layer's, whose turn it is.
            chosen: what of each is read; None: all of it. The rest need not be fetched.
        """
        return regions

    def leave(self, regions: list[Region]) -> None:  # noqa: B027  # most have nothing to do
        """Attention has read them."""


class DiskOffload(Offload):
    """Pools are mapped files without names: the kernel reads ahead when told, and forgets when told.

    Pages that a step does not choose are not touched by the kernel for attention, and so are read only where they lie beside others.

    Args:
        directory: where the files are.

    Raises:
        ValueError: no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ValueError(f"offload: there is no directory {directory}")
        self.directory = directory
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.allocate((1,), torch.uint8)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = count * dtype.itemsize
        try:
            with tempfile.NamedTemporaryFile(prefix="compress-kv-", dir=self.directory) as file:
                # A full disk is noticed here, not as a fault in the middle of a step.
                os.posix_fallocate(file.fileno(), 0, size)
                flat = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
        except OSError as error:
            raise ValueError(_no_room(self.directory, size, error)) from error
        return flat.view(shape)

    def fetch(self, regions: list[Region]) -> None:
        self._advise(regions, _WILL_NEED)

    def leave(self, regions: list[Region]) -> None:
        self._advise(regions, _DO_NOT_NEED)

    def _advise(self, regions: list[Region], advice: int) -> None:
        for region in regions:
            for pool in region.pools.values():
                # Only whole pages of the machine; a pool of a mapped file begins at one.
                length = pool.untyped_storage().nbytes() // mmap.PAGESIZE * mmap.PAGESIZE
                if length:
                    self._madvise(pool.data_ptr(), length, advice)  # advice: nothing is lost where it is not taken


def _no_room(directory: Path, size: int, error: OSError) -> str:
    return f"offload: {directory} cannot hold {size / 1e6:.1f} MB of cache: {error.strerror}"


class RecordFile:
    """Pages of all layers of the native engine in a mapped file without a name.

    A layer's are in memory while it reads them; then C forgets them, and what is left in the system's cache of files the system may
    drop. On disk it takes what was reserved.

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
            needed = len(self.records) * pages * self._width
            raise CompressError(f"kv_cache: {_no_room(self._directory, needed, error)}") from error
        self._reserved = pages

    def forget(self) -> None:
        """Nothing of it is wanted in memory now; nothing is lost."""
        self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class _Copy:
    """A region's pools on the GPU, complete after the event, and its lengths then: whatever is written to a region makes new ones."""

    lengths: torch.Tensor
    pools: dict[str, torch.Tensor]
    event: torch.cuda.Event


class HostOffload(Offload):
    """Pools are pinned memory of the host; a copy of the next layer's is made on the GPU while a layer computes.

    Where a selection chose, only the pages are copied that it chose, when the layer's turn has come.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._copies: WeakKeyDictionary[Region, _Copy] = WeakKeyDictionary()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def fetch(self, regions: list[Region]) -> None:
        self._stream.wait_stream(self._current())
        for region in regions:
            known = self._copies.get(region)
            if known is None or known.lengths is not region.lengths:
                self._copies[region] = _Copy(region.lengths, *self._copied(region.pools))

    def fetched(self, regions: list[Region], chosen: list[Chosen | None]) -> list[Region]:
        self.fetch([region for region, some in zip(regions, chosen, strict=True) if some is None])
        result = []
        for region, some in zip(regions, chosen, strict=True):
            found = self._copies.pop(region, None)
            if found is None or found.lengths is not region.lengths:
                assert some is not None, "whole regions have just been fetched"
                result.append(self._only(region, some))
                continue
            stream = self._current()
            stream.wait_event(found.event)
            for copy in found.pools.values():
                if copy.is_cuda:
                    copy.record_stream(stream)
            result.append(region.with_pools(found.pools))
        return result

    def _only(self, region: Region, chosen: Chosen) -> Region:
        """The region with copies of the pages that are read; others have some page of these, which attention passes over."""
        table = region.table
        rows = chosen.counted.nonzero()[:, 0]
        columns = chosen.index[chosen.counted] // (PAGE // chosen.unit)
        ids, places = table[rows, columns].unique(return_inverse=True)
        if not len(ids):
            ids = table.new_zeros(1)
        own, own_table = ids.cpu(), torch.zeros_like(table)
        own_table[rows, columns] = places
        pools = {}
        for name, pool in region.pools.items():
            pinned = self.allocate((len(own), *pool.shape[1:]), pool.dtype)
            torch.index_select(pool, 0, own, out=pinned)
            pools[name] = pinned.to(self.device, non_blocking=True)
        return region.with_pools(pools, own_table)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _copied(self, pools: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event]:
        """Copies on the GPU, under way, and the event that says when they are there."""
        with torch.cuda.stream(self._stream):
            copies = {name: pool.to(self.device, non_blocking=True) for name, pool in pools.items()}
            return copies, self._stream.record_event()
