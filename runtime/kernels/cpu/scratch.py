"""Working memory of the C kernels: one buffer a thread, kept between calls, so that concurrent calls never share one."""

from __future__ import annotations

import threading

import torch

_KEPT = 1 << 26  # bytes; a larger buffer is given back after use
_local = threading.local()


def tensor_of(count: int) -> torch.Tensor:
    """At least `count` bytes, uint8, of this thread; what the last call left there is overwritten."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < count:
        buffer = torch.empty(max(count, 1 << 16), dtype=torch.uint8)
        _local.buffer = buffer
    elif buffer.numel() > max(_KEPT, 4 * count):
        buffer = _local.buffer = torch.empty(max(count, 1 << 16), dtype=torch.uint8)
    return buffer


def bytes_at(count: int) -> int:
    """Address of `tensor_of(count)`; valid until this thread's next call."""
    return tensor_of(count).data_ptr()
