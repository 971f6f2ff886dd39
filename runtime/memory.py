"""Give freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


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
