"""GPU that kernels are chosen for: the one that is there, or one that is assumed while they are compiled for it elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch

from runtime.system.context import assigned

_assumed: ContextVar[tuple[int, int]] = ContextVar("capability", default=(9, 0))


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the device, or the assumed one for tensors that are on no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _assumed.get()


def assuming(capability: int) -> AbstractContextManager[tuple[int, int]]:
    """While active in this thread, tensors on meta count as ones on a GPU of this compute capability (80, 90, 100)."""
    return assigned(_assumed, (capability // 10, capability % 10))
