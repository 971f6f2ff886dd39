"""Memory of this process: what it took at most, what it may still take, and giving back what was freed."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_MMAP_THRESHOLD = -3  # of malloc.h
_KEPT_BYTES = 2**20
_GROUPS = Path("/sys/fs/cgroup")
# (where the groups are, limit, what is taken, what of that is cached files, which the kernel gives up first), of version 2 and of 1
_VERSIONS = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def free_bytes() -> int:
    """Bytes of memory that this process may still take: what the machine has free, or what is left of the limits of the control groups
    (containers, batch jobs) that it is in, where that is less: beyond those the kernel kills it, whatever the machine has."""
    import psutil

    return max(0, min([int(psutil.virtual_memory().available), *left_in_groups(Path("/proc/self/cgroup"), _GROUPS)]))


def available_bytes(device: torch.device) -> int:
    """Free memory of a device, in bytes; of this process on the CPU (`free_bytes`). Of a GPU with what torch's allocator holds unused."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_bytes()


def left_in_groups(membership: Path, root: Path) -> Iterator[int]:
    """What each group that has a limit leaves, of those that a process is in and those around them."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # no Linux
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        version = "memory" if "memory" in controllers.split(",") else controllers
        if version not in _VERSIONS:
            continue
        limit, taken, cached = _VERSIONS[version]
        top = root / version
        # In a container the groups outside are not to be seen, and its own may be mounted as the top.
        inside = [Path(own), *Path(own).parents] if ".." not in Path(own).parts else [Path("/")]
        for group in (top / name.relative_to("/") for name in inside):
            try:
                # Of a group without a limit there is no file at the top, and below it says "max".
                most = int((group / limit).read_text())
                used = int((group / taken).read_text())
                kept = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                yield most - used + sum(int(kept.get(name, 0)) for name in cached)
            except (OSError, ValueError):
                continue


def peak_bytes() -> int:
    """Most bytes that were resident at a time since the process began.

    Where the system tells it, not `ru_maxrss`: that of a process starts from what its parent held when it was forked.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.M)
    except (OSError, ValueError):
        found = None
    if found is not None:
        return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


def return_memory() -> None:
    """Let the C library hand back what it keeps of freed buffers; their sizes change from layer to layer, so little is reused."""
    trim = _trim()
    if trim is not None:
        trim(0)


def keep_nothing_freed() -> None:
    """From now on the C library asks the system for every buffer of some size and hands it back when it is freed, for good: what is
    resident is what is used, and a limit can be kept to. By default it serves buffers of up to 32 MiB out of a heap, which stays
    fragmented. This costs some time, for fresh pages are zeroed. Systems without glibc are left alone."""
    if _trim() is not None:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    """`malloc_trim` of glibc; other systems return memory by themselves."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl
        return None
