"""The threads that C kernels run on: torch's own."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger("compress.native")


@cache
def openmp() -> tuple[ctypes.c_void_p, ...] | None:
    """Addresses of GOMP_parallel, GOMP_barrier, omp_get_thread_num and omp_get_num_threads in the library torch runs on.

    They are what `set_pool` of a library with `c/pool.h` takes. The same library means the same threads: a second pool beside it
    would fight it for the cores. None: it was not found, kernels run on one thread, and the log says so once.
    """
    torch_folder = Path(torch.__file__).parent
    places = [torch_folder / "lib", torch_folder.parent / "torch.libs"]
    for place in places:
        for pattern in ("libgomp*", "libiomp5*", "libomp*"):
            for file in sorted(place.glob(pattern)):
                try:
                    library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
                    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names)
                except (OSError, AttributeError):
                    continue
    _log.warning("torch's OpenMP library was not found: CPU kernels run on one thread")
    return None
