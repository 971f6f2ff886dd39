"""Cache of traced graphs in the user's cache directory: tracing takes a second a layer, and one graph serves every dialect and scheme.

A graph is found again by everything that went into it: config, classes, the values of all tensors that were traced with their weights
(norms, tables of positions), the shapes of those that were not, and the versions of whoever traced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.modeling import layer_sizes, skeleton
from runtime.system.directories import cache_directory

if TYPE_CHECKING:
    import onnx_ir
    from torch import nn

_log = logging.getLogger("compress.export")
MOST_FILES, MOST_BYTES = 32, 1 << 30  # graphs kept; the oldest go first
# Where an artifact lies, and how its weights do, has no part in a graph that holds marks in their place.
_NO_PART = ("quantization_config", "_name_or_path")
# What builds, marks and traces a model.
_CODE = (
    *(Path(__file__).parent / name for name in ("marks.py", "trace.py", "trace_encoders.py")),
    *map(Path, (skeleton.__file__, layer_sizes.__file__)),
)
_TRACERS = ("torch", "transformers", "onnxscript", "onnx-ir", "onnx")


def key(model: nn.Module, config: Any, **details: Any) -> str:
    """Name of the graph that tracing this model (weights marked) would give."""
    import torch

    digest = hashlib.sha256()
    described = {
        "config": {name: value for name, value in config.to_dict().items() if name not in _NO_PART},
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "details": {name: str(value) for name, value in sorted(details.items())},
        "versions": {name: version(name) for name in _TRACERS},
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in _CODE],
    }
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    for name, value in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.numel():
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load(name: str) -> onnx_ir.Model | None:
    """The graph kept under `name`; None when there is none or it cannot be read."""
    import onnx_ir as ir

    file = cache_directory("traced") / f"{name}.onnx"
    if not file.is_file():
        return None
    try:
        model = ir.load(str(file))
        os.utime(file)
    except Exception as error:  # a damaged file is whatever protobuf makes of it; tracing again is right in any case
        _log.warning("%s cannot be read (%s) and is made again", file, type(error).__name__)
        return None
    return model


def store(name: str, model: onnx_ir.Model) -> None:
    """Keep a graph. A cache that cannot be written is no reason to fail."""
    import onnx_ir as ir

    folder = cache_directory("traced")
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ir.save(model, str(temporary))
        os.replace(temporary, folder / f"{name}.onnx")
        kept = sorted(folder.glob("*.onnx"), key=lambda file: file.stat().st_mtime)
        sizes = list(accumulate(file.stat().st_size for file in reversed(kept)))
        for file, size in zip(reversed(kept), sizes, strict=True):
            if size > MOST_BYTES or file in kept[:-MOST_FILES]:
                file.unlink(missing_ok=True)
    except Exception as error:  # a graph above 2 GB is one that protobuf refuses in its own way
        _log.warning("the traced graph is not kept: %s", error)
        temporary.unlink(missing_ok=True)
