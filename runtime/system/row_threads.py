"""Calls of C routines whose rows do not depend on each other, divided among threads; the result does not depend on the division."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial

import torch

_LANES = 32  # ranges start at multiples of it
_Argument = torch.Tensor | float | None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")


if hasattr(os, "register_at_fork"):  # the threads of a pool are not there in a child
    os.register_at_fork(after_in_child=_pool.cache_clear)


def run_on_rows(rows: int, routine: ctypes._NamedFuncPointer, *arguments: _Argument, fewest: int = 256) -> None:
    """Call `routine(*arguments, first, end)` on ranges of rows, on at most `torch.get_num_threads()` threads with about `fewest` rows or
    more each. Tensors are passed as addresses (None: NULL), integers as int64, floats as float."""
    given = [_to_c(argument) for argument in arguments]
    threads = max(1, min(torch.get_num_threads(), rows // fewest))
    size = -(-rows // (threads * _LANES)) * _LANES
    spans = [(start, min(start + size, rows)) for start in range(0, rows, size)] if rows else []
    calls = [partial(routine, *given, _to_c(start), _to_c(end)) for start, end in spans]
    if len(calls) <= 1:
        for call in calls:
            call()
        return
    # ctypes releases the interpreter while C runs.
    others = [_pool(threads - 1).submit(call) for call in calls[1:]]
    try:
        calls[0]()
    finally:
        wait(others)  # an interrupt must not free what they are still writing to
    for other in others:
        other.result()


def _to_c(value: _Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_float(value)
