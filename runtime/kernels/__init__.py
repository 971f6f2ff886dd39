"""Kernels and the table that finds them by (operation, storage format, device type).

To add a kernel: write one file with a `Kernel` subclass and put it in `_KERNELS`, before those it beats.
"""

from __future__ import annotations

import difflib

from runtime.errors import RequestError
from runtime.kernels.base import Kernel, Layer
from runtime.kernels.cpu.int4 import Int4Cpu
from runtime.kernels.cpu.int8 import Int8Cpu
from runtime.kernels.cpu.w8a8 import W8A8Cpu
from runtime.kernels.cuda.fp8 import Float8Cuda
from runtime.kernels.reference import Reference

__all__ = ["REFERENCE", "Kernel", "Layer", "candidates", "find", "names", "table"]

REFERENCE = Reference()
_KERNELS: tuple[Kernel, ...] = (Int4Cpu(), Int8Cpu(), W8A8Cpu(), Float8Cuda(), REFERENCE)


def names() -> list[str]:
    """Names of all kernels, fastest first."""
    return [kernel.name for kernel in _KERNELS]


def table() -> dict[tuple[str, str, str], list[Kernel]]:
    """{(operation, format, device type): kernels in order of preference}."""
    found: dict[tuple[str, str, str], list[Kernel]] = {}
    for kernel in _KERNELS:
        for device in ("cpu", "cuda") if kernel.device is None else (kernel.device,):
            for name in sorted(kernel.formats):
                found.setdefault((kernel.operation, name, device), []).append(kernel)
    return found


def candidates(layer: Layer) -> list[Kernel]:
    """Kernels that can compute the layer, best first; the reference always ends the list."""
    return [kernel for kernel in _KERNELS if _why_not(kernel, layer) is None]


def find(layer: Layer, kernels: str = "auto") -> Kernel:
    """The kernel for a layer: the best one (`"auto"`) or the one called `kernels`.

    Raises:
        RequestError: there is no kernel of that name, or it cannot compute this layer.
    """
    if kernels == "auto":
        return candidates(layer)[0]
    for kernel in _KERNELS:
        if kernel.name == kernels:
            reason = _why_not(kernel, layer)
            if reason is not None:
                raise RequestError(f"kernel {kernels} cannot compute this layer: {reason}")
            return kernel
    near = difflib.get_close_matches(str(kernels), ["auto", *names()], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RequestError(f"unknown kernel {kernels!r}, known: auto, {', '.join(names())}{hint}")


def _why_not(kernel: Kernel, layer: Layer) -> str | None:
    if kernel.device is not None and layer.device.type != kernel.device:
        return f"it runs on {kernel.device}, the layer is on {layer.device.type}"
    if layer.entry.format not in kernel.formats:
        return f"it does not read format {layer.entry.format}"
    return kernel.why_not(layer)
