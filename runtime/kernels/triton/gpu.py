"""GPU that kernels are chosen for and launched on: the one that is there, or one that is assumed while they are compiled for it
elsewhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from runtime.system.context import assigned

_assumed: ContextVar[tuple[int, int]] = ContextVar("capability", default=(9, 0))


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the device, none of AMD's, or the assumed one for tensors that are on no GPU."""
    if device.type != "cuda":
        return _assumed.get()
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)


def entered(device: torch.device) -> AbstractContextManager[Any]:
    """While active, `device` is the current one, where it is a GPU: that is where Triton and the driver launch, and whose stream they
    take, wherever the tensors are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def assuming(capability: int) -> AbstractContextManager[tuple[int, int]]:
    """While active in this thread, tensors on meta count as ones on a GPU of this compute capability (80, 90, 100)."""
    return assigned(_assumed, (capability // 10, capability % 10))
