"""Launch configuration of a kernel on a GPU: measured once, stored on disk (`runtime.kernels.tuning`).

Keyed by (kernel, shape class, dtype, device name). Where measuring is allowed (`compress tune`), the first call of a new key times the
candidates (some seconds, most of it compilation). Nothing is timed elsewhere, in the interpreter, or while a CUDA graph is captured: the
first candidate is the default.
"""

from __future__ import annotations

import logging
import os
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from runtime.kernels import tuning
from runtime.kernels.triton import aot, gpu, jit
from runtime.system.context import assigned

Config = dict[str, Any]

_log = logging.getLogger(__name__)
#: Choices of this process, so that a launch costs one lookup: by what they depend on, and whether they could be measured.
settled: dict[tuple[Any, ...], Config] = {}
_every: ContextVar[bool] = ContextVar("every", default=False)


def interpreted() -> bool:
    """True when kernels run in triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def every_candidate() -> AbstractContextManager[bool]:
    """While active and launches are recorded, `choose` launches all candidates, so that all are written down."""
    return assigned(_every, True)


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
    if _every.get() and jit.is_recording():
        for config in candidates[1:]:
            launch(config)
        return candidates[0]
    if x.device.type != "cuda" or interpreted():
        return candidates[0]
    may_measure = tuning.may_measure()
    if may_measure:
        with gpu.entered(x.device):
            may_measure = not torch.cuda.is_current_stream_capturing()
    asked = (kernel, *shape, x.dtype, x.device)
    quick = (*asked, may_measure)
    if quick in settled:
        return settled[quick]
    able = compiled_ahead(candidates, launch, x.device)
    device = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(x.device)).strip("-")
    key = f"{kernel} {'x'.join(str(v) for v in shape)} {str(x.dtype).removeprefix('torch.')}"
    if len(able) < len(candidates):  # the best of these is not the best of all
        key += " compiled ahead"
    with gpu.entered(x.device):
        best = tuning.recall(
            device, key, able, lambda: fastest(able, launch) if may_measure and len(able) > 1 else None
        )
    settled[quick] = best
    if may_measure:
        settled.pop((*asked, False), None)
    return best


def fastest(candidates: Sequence[Config], launch: Callable[[Config], object]) -> Config:
    """Time every candidate on the current device (median, caches flushed in between); the first one when all fail."""
    best, least = candidates[0], float("inf")
    for config in candidates:
        try:
            taken = _median(lambda config=config: launch(config))  # type: ignore[misc]
        except Exception as error:  # out of shared memory or registers on this device: not a candidate here
            _log.debug("configuration %s does not run: %s", config, error)
            continue
        if taken < least:
            best, least = config, taken
    return best


def compiled_ahead(
    candidates: Sequence[Config], launch: Callable[[Config], object], device: torch.device
) -> Sequence[Config]:
    """Those of the candidates that need no compiler; all of them where no export with kernels is loaded, or it has none of these."""
    if not aot.offers(device):
        return candidates
    there = [config for config in candidates if aot.missing(lambda config=config: launch(config), device) is None]  # type: ignore[misc]
    return there or candidates


def _median(call: Callable[[], object]) -> float:
    """Milliseconds that `call` takes on the current GPU."""
    call()
    cache = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for start, end in events:
        cache.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)
