"""TensorRT and GPU of this machine, as far as building an engine needs them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from runtime.errors import first_line

MODULE = "tensorrt"


def missing() -> str | None:
    """Why no engine can be built here, in a clause; None when one can."""
    if importlib.util.find_spec(MODULE) is None:
        return "TensorRT is not installed (pip install tensorrt)"
    try:
        api()
    except (ImportError, OSError, RuntimeError) as error:  # what its loader raises where a CUDA library is not there
        return f"TensorRT is installed and cannot be imported ({first_line(error)})"
    return None if gpu() is not None else "there is no NVIDIA GPU that torch can use"


def api() -> Any:
    """The tensorrt module."""
    return importlib.import_module(MODULE)


def gpu() -> dict[str, Any] | None:
    """Name, compute capability and memory of the first GPU, the only kind that an engine built here runs on; None: no GPU."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    capability = f"{found.major}.{found.minor}"
    return {"name": found.name, "compute_capability": capability, "memory_bytes": int(found.total_memory)}
