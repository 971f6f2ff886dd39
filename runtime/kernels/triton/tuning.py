"""Which launch configuration a kernel takes on which device: measured once, remembered on disk.

Keyed by (kernel, shape class, dtype, device name). The first call of a new key on a GPU times the candidates (some seconds, most
of it compilation); later processes read `tuning/NAME.json` under `$COMPRESS_CACHE` or `~/.cache/compress`. Nothing is timed in
the interpreter, while a CUDA graph is captured, or when `enabled` is False: the first candidate is the default.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.kernels import remembered

Config = dict[str, Any]

enabled = True  # False: defaults only, nothing is timed (what is remembered already is still used)
assumed_capability = (9, 0)  # set by `compiled.record`
_log = logging.getLogger(__name__)
_lock = threading.RLock()
_known: dict[Path, dict[str, Config]] = {}  # contents of the files read so far
_chosen: dict[tuple[Any, ...], Config] = {}  # final choices of this process, so that a launch costs one lookup


def interpreted() -> bool:
    """True when kernels run in triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the device, or the one kernels are being compiled for where there is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else assumed_capability


def row_class(rows: int) -> int:
    """Rows rounded up to a power of two: row counts that share a choice."""
    return 1 << max(0, rows - 1).bit_length()


def choose(
    kernel: str,
    shape: Sequence[Any],
    x: torch.Tensor,
    candidates: Sequence[Config],
    launch: Callable[[Config], object],
) -> Config:
    """The candidate to launch for this shape class on the device and with the dtype of `x`.

    `launch(config)` runs the kernel once; it may raise for candidates that do not fit the device, which are passed over.
    """
    if x.device.type != "cuda" or interpreted():
        return candidates[0]
    quick = (kernel, *shape, x.dtype, x.device)
    if quick in _chosen:
        return _chosen[quick]
    path = remembered.file(re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(x.device)).strip("-"))
    key = f"{kernel} {'x'.join(str(v) for v in shape)} {str(x.dtype).removeprefix('torch.')}"
    with _lock:
        known = _known.get(path)
        if known is None:
            known = _known[path] = remembered.read(path, dict)
        found = known.get(key)
        if found is not None and found in candidates:  # a candidate of an older version may no longer be one
            _chosen[quick] = found
            return found
        if not enabled or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        best = fastest(candidates, launch)
        known[key] = _chosen[quick] = best
        remembered.store(path, key, best)
        return best


def fastest(candidates: Sequence[Config], launch: Callable[[Config], object]) -> Config:
    """Time every candidate on the current device (median, caches flushed in between); the first one when all fail."""
    from triton.testing import do_bench

    best, least = candidates[0], float("inf")
    for config in candidates:
        try:
            taken = float(do_bench(lambda config=config: launch(config), warmup=5, rep=20, return_mode="median"))
        except Exception as error:  # out of shared memory or registers on this device: not a candidate here
            _log.debug("configuration %s does not run: %s", config, error)
            continue
        if taken < least:
            best, least = config, taken
    return best
