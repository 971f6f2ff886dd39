"""Export targets by name: those of this package, and those of others by entry point (`compress.export_targets`).

An entry names a subclass of `export.target.Target`, whose `name` is the entry's.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

from export.target import Target
from runtime.config.plugins import entries, merge
from runtime.errors import CompressError, RequestError

GROUP = "compress.export_targets"
_TARGETS = {
    "huggingface": "export.huggingface.target:HuggingFaceTarget",
    "onnx": "export.onnx.target:OnnxTarget",
    "tensorrt": "export.tensorrt.target:TensorrtTarget",
    "gguf": "export.gguf.target:GgufTarget",
    "triton": "export.triton_aot.target:TritonTarget",
}


def _loaders() -> dict[str, Callable[[], Any]]:
    own = {name: partial(pkgutil.resolve_name, entry) for name, entry in _TARGETS.items()}
    return merge("target", GROUP, own, entries(GROUP).items())


def names() -> list[str]:
    """Names of all targets, this package's first."""
    return list(_loaders())


def get(name: str) -> Target:
    """The target called `name`.

    Raises:
        RequestError: there is none; the nearest name is in the message.
        CompressError: what another package adds under the name is no target of that name.
    """
    loaders = _loaders()
    if name not in loaders:
        near = difflib.get_close_matches(str(name).lower(), names(), n=1, cutoff=0.4)
        hint = f", did you mean {near[0]}?" if near else ""
        raise RequestError(f"unknown target {name!r}{hint} (targets: {', '.join(names())})")
    kind = loaders[name]()
    if not (isinstance(kind, type) and issubclass(kind, Target)) or kind.name != name:
        raise CompressError(f"the entry point {name!r} of {GROUP} is no export target of that name, but {kind!r}")
    return kind()
