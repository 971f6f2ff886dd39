"""The targets by name. To add one: a file or folder with a `Target`, and a line in `_TARGETS`."""

from __future__ import annotations

import difflib
from importlib import import_module

from export.target import Target
from runtime.errors import RequestError

_TARGETS = {
    "huggingface": "export.huggingface.target:HuggingFaceTarget",
    "onnx": "export.onnx.target:OnnxTarget",
    "tensorrt": "export.tensorrt.target:TensorrtTarget",
    "gguf": "export.gguf.target:GgufTarget",
    "triton": "export.triton_aot.target:TritonTarget",
}


def names() -> list[str]:
    """Names of all targets."""
    return list(_TARGETS)


def get(name: str) -> Target:
    """The target called `name`; RequestError with the nearest name otherwise."""
    if name not in _TARGETS:
        near = difflib.get_close_matches(str(name).lower(), _TARGETS, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]}?" if near else ""
        raise RequestError(f"unknown target {name!r}{hint} (targets: {', '.join(_TARGETS)})")
    module, _, attribute = _TARGETS[name].partition(":")
    target: Target = getattr(import_module(module), attribute)()
    return target
