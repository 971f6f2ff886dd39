"""Memory of this process: what it took at most, and giving back what was freed."""

from __future__ import annotations

import ctypes
import re
import sys
from functools import cache
from pathlib import Path


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


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    """`malloc_trim` of glibc; other systems return memory by themselves."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl
        return None
