"""Choices that are measured once and stored on disk, and the one among several kernels over one layout on a CPU.

One file a device, `tuning/NAME.json` under `$COMPRESS_CACHE` or `~/.cache/compress`: `{"version": ..., "choices": {key: choice}}`. A file
that is damaged is ignored and replaced, one that cannot be written is done without; either is said once in the log.

Measuring is done where somebody waits for it (`measuring`): on CPUs while a whole model is loaded, never longer than a budget, and in
`compress tune`. Elsewhere, in requests above all, what is remembered is used, and else the first option.

CPU kernels are keyed by (kernels, layer's scheme and dtype, rounded shape, shape class, threads). The first kernel is also taken unless
another is at least a tenth faster: the first is the one whose results do not depend on the machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from runtime.errors import first_line
from runtime.kernels.base import Kernel, Layer, ShapeClass
from runtime.system import instruction_sets, processes
from runtime.system.context import assigned
from runtime.system.directories import cache_directory

VERSION = 1
_log = logging.getLogger("compress.kernels")
_lock = threading.RLock()
complained: set[tuple[Path, str]] = set()
remembered: dict[
    Path, dict[str, Any]
] = {}  # contents of the files read so far, and what was measured since: one may not be writable

Option = TypeVar("Option", str, dict[str, Any])


class _File(TypedDict):
    version: int
    choices: dict[str, str | dict[str, Any]]


_FILE = TypeAdapter(_File)


def recall(device: str, key: str, options: Sequence[Option], measure: Callable[[], Option | None]) -> Option:
    """The option that was measured to be best on a device, now if nobody remembers; the first where `measure` does not say."""
    path = cache_directory("tuning") / f"{device}.json"
    with _lock:
        known = remembered.get(path)
        if known is None:
            known = remembered[path] = _read(path)
        if known.get(key) in options:  # one of an older version may no longer be
            return known[key]
        best = measure()
        if best is None:
            return options[0]
        known[key] = best
        _store(path, key, best)
        return best


def _read(path: Path) -> dict[str, Any]:
    """What a file remembers; nothing when it is missing, of another version or damaged."""
    try:
        content = _FILE.validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        _complain(path, "ignoring the tuning file %s, it cannot be read: %s", path, first_line(error))
        return {}
    return content["choices"] if content["version"] == VERSION else {}


def _store(path: Path, key: str, choice: Any) -> None:
    """Add one choice: read again (another process may have written), then replace the file in one step."""
    content = {"version": VERSION, "choices": _read(path) | {key: choice}}
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _complain(path, "cannot remember tuning results in %s: %s", path, error)


def _complain(path: Path, message: str, *details: object) -> None:
    """Once a file and kind of trouble: a read-only home is no reason to fail, or to repeat oneself for every layer."""
    if (path, message) not in complained:
        complained.add((path, message))
        _log.warning(message, *details)


BUDGET = 0.5  # seconds of measuring while one model is loaded
_ROWS: dict[ShapeClass, int] = {"decode": 1, "batch": 16, "prefill": 256}
_WINS_BY = 0.9
_SMALL = 1 << 18  # weights; smaller layers are not worth measuring
_OUT = 512  # rows of the weight that are measured: time is proportional to them
_left: ContextVar[list[float] | None] = ContextVar("seconds_left", default=None)


def measuring(seconds: float | None = None) -> AbstractContextManager[Any]:
    """While active, what nobody remembers may be measured, for so many seconds in all (None: `BUDGET`); inside another one, for what that
    has left."""
    return nullcontext() if may_measure() else assigned(_left, [BUDGET if seconds is None else seconds])


def may_measure() -> bool:
    """Whether there is time left for measuring."""
    left = _left.get()
    return left is not None and left[0] > 0


def stored() -> dict[Path, dict[str, Any]]:
    """What the files say, by file."""
    return {path: _read(path) for path in sorted(cache_directory("tuning").glob("*.json"))}


def fastest(layer: Layer, rows: ShapeClass, kernels: Sequence[Kernel]) -> Kernel:
    """The kernel for this layer and shape class, out of several of one layout in order of preference."""
    if len(kernels) == 1 or layer.device.type != "cpu" or layer.shape[0] * layer.shape[1] < _SMALL:
        return kernels[0]
    layer = replace(layer, shape=(_OUT, _rounded(layer.shape[1])))
    names, budget = [kernel.name for kernel in kernels], _left.get()

    def measure() -> str | None:
        if budget is None or budget[0] <= 0:
            return None
        start = time.perf_counter()
        best = _measured(layer, _ROWS[rows], kernels, start + budget[0])
        budget[0] -= time.perf_counter() - start
        return None if best is None else names[best]

    return kernels[names.index(recall(f"cpu-{machine()}", _key(layer, rows, kernels), names, measure))]


def _measured(layer: Layer, rows: int, kernels: Sequence[Kernel], end: float) -> int | None:
    """Number of the fastest; None when time was out before each had run three times, the first of which does not count."""
    tensors = kernels[0].sample(layer)
    if tensors is None:
        return 0
    x = torch.randn(rows, layer.shape[1]).to(layer.dtype)
    taken = [float("inf")] * len(kernels)
    for attempt in range(3):  # the first warms up, the others count
        for index, kernel in enumerate(kernels):
            if time.perf_counter() > end:
                return None
            start = time.perf_counter()
            kernel.run(x, tensors, layer, None)
            if attempt > 0:
                taken[index] = min(taken[index], time.perf_counter() - start)
    best = min(range(len(kernels)), key=lambda index: taken[index])
    return best if taken[best] < _WINS_BY * taken[0] else 0


def _rounded(columns: int) -> int:
    """Columns up to the next power of two, 256 to 8192: layers that share a choice."""
    return min(8192, max(256, 1 << (columns - 1).bit_length()))


def _key(layer: Layer, rows: ShapeClass, kernels: Sequence[Kernel]) -> str:
    parts = [
        "/".join(kernel.name for kernel in kernels), kernels[0].layout, repr(layer.entry.scheme.weights),
        str(layer.dtype).removeprefix("torch."), f"{layer.shape[1]} columns", rows, f"{torch.get_num_threads()} threads",
    ]  # fmt: skip
    return " ".join(parts)


@cache
def machine() -> str:
    """What tells this CPU, torch and a forced instruction set from others that share the home directory."""
    parts = (processes.identity(), torch.__version__, instruction_sets.forced())
    return hashlib.sha256("\n".join(filter(None, parts)).encode()).hexdigest()[:12]
