"""TensorRT and GPU of this machine, as far as building an engine needs them."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

import torch

MODULE = "tensorrt"


@dataclass(frozen=True)
class Gpu:
    """The GPU that an engine is built for, and the only kind it then runs on."""

    name: str
    compute_capability: str
    memory_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def missing() -> str | None:
    """Why no engine can be built here, in a clause; None when one can."""
    if importlib.util.find_spec(MODULE) is None:
        return "TensorRT is not installed (pip install tensorrt)"
    try:
        api()
    except (ImportError, OSError, RuntimeError) as error:  # what its loader raises where a CUDA library is not there
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"TensorRT is installed and cannot be imported ({first})"
    if gpu() is None:
        return "there is no NVIDIA GPU that torch can use"
    return None


def api() -> Any:
    """The tensorrt module."""
    return importlib.import_module(MODULE)


def gpu() -> Gpu | None:
    """The first GPU; None where there is none."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return Gpu(found.name, f"{found.major}.{found.minor}", int(found.total_memory))
