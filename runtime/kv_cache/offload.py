"""Older tokens away from where attention computes: in the host's memory, or in a file on disk; fetched before their layer's turn."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from runtime.config.settings import ConfigError, Text
from runtime.kv_cache.pages import PAGE, Allocate
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
            handle, name = tempfile.mkstemp(prefix="compress-kv-", dir=self.directory)
            try:
                os.posix_fallocate(
                    handle, 0, size
                )  # a full disk is noticed here, not as a fault in the middle of a step
                flat = torch.from_file(name, shared=True, size=count, dtype=dtype)
            finally:
                os.close(handle)
                os.unlink(name)
        except OSError as error:
            raise ValueError(
                f"offload: {self.directory} cannot hold {size / 1e6:.1f} MB of cache: {error.strerror}"
            ) from error
        return flat.view(shape)

    def fetch(self, regions: list[Region]) -> None:
        self._advise(regions, _WILL_NEED)

    def leave(self, regions: list[Region]) -> None:
        self._advise(regions, _DO_NOT_NEED)

    def _advise(self, regions: list[Region], advice: int) -> None:
        for region in regions:
            for pool in region.pages.pools.values():
                # Only whole pages of the machine; a pool of a mapped file begins at one.
                length = pool.untyped_storage().nbytes() // mmap.PAGESIZE * mmap.PAGESIZE
                if length:
                    self._madvise(pool.data_ptr(), length, advice)  # advice: nothing is lost where it is not taken


@dataclass(frozen=True)
class _Copy:
    """A region's pools on the GPU, and what they were copied from."""

    pools: dict[str, torch.Tensor]
    lengths: torch.Tensor
    copies: dict[str, torch.Tensor]
    event: torch.cuda.Event

    def is_of(self, region: Region) -> bool:
        """Whether the region still is what was copied: whatever is written to it makes new lengths, new pools or both."""
        pages = region.pages
        same = all(pages.pools[name] is pool for name, pool in self.pools.items())
        return same and pages.lengths is self.lengths


class HostOffload(Offload):
    """Pools are pinned memory of the host; a copy of the next layer's is made on the GPU while a layer computes.

    Where a selection chose, only the pages are copied that it chose, when the layer's turn has come.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._copies: dict[int, _Copy] = {}

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def fetch(self, regions: list[Region]) -> None:
        self._stream.wait_stream(self._current())
        for region in regions:
            known = self._copies.get(id(region))
            if known is None or not known.is_of(region):
                pools = dict(region.pages.pools)
                self._copies[id(region)] = _Copy(pools, region.pages.lengths, *self._copied(pools))

    def fetched(self, regions: list[Region], chosen: list[Chosen | None]) -> list[Region]:
        self.fetch([region for region, some in zip(regions, chosen, strict=True) if some is None])
        result = []
        for region, some in zip(regions, chosen, strict=True):
            found = self._copies.pop(id(region), None)
            if found is None or not found.is_of(region):
                assert some is not None, "whole regions have just been fetched"
                result.append(self._only(region, some))
                continue
            stream = self._current()
            stream.wait_event(found.event)
            for copy in found.copies.values():
                if copy.is_cuda:
                    copy.record_stream(stream)
            result.append(region.with_pools(found.copies))
        return result

    def _only(self, region: Region, chosen: Chosen) -> Region:
        """The region with copies of the pages that are read; others have some page of these, which attention passes over."""
        table = region.pages.table
        counted = torch.arange(chosen.index.shape[1], device=table.device) < chosen.counts[:, None]
        rows = counted.nonzero()[:, 0]
        columns = chosen.index[counted] // (PAGE // chosen.unit)
        ids, places = table[rows, columns].unique(return_inverse=True)
        if not len(ids):
            ids = table.new_zeros(1)
        staged_table = torch.zeros_like(table)
        staged_table[rows, columns] = places
        own = ids.cpu()
        pools = {}
        for name, pool in region.pages.pools.items():
            staged = self.allocate((len(own), *pool.shape[1:]), pool.dtype)
            torch.index_select(pool, 0, own, out=staged)
            pools[name] = staged.to(self.device, non_blocking=True)
        return region.with_pools(pools, staged_table)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _copied(self, pools: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event]:
        """Copies on the GPU, under way, and the event that says when they are there."""
        with torch.cuda.stream(self._stream):
            copies = {name: pool.to(self.device, non_blocking=True) for name, pool in pools.items()}
            event = torch.cuda.Event()
            event.record(self._stream)
        return copies, event


__all__ = ["Allocate", "DiskOffload", "HostOffload", "Offload", "OffloadPlan"]
