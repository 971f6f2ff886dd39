"""Kernels, and the choice of those that compute a layer.

To add a kernel: write one file with a `Kernel` subclass and put it in `KERNELS`, before those it beats.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from runtime.config.messages import did_you_mean
from runtime.errors import RequestError
from runtime.kernels import tuning
from runtime.kernels.base import CLASSES, Choice, Kernel, Layer, ShapeClass, shape_class
from runtime.kernels.cpu import integer
from runtime.kernels.cpu.expansion import DFloat11Cpu, TernaryCpu
from runtime.kernels.cpu.float8 import Float8Cpu
from runtime.kernels.cpu.int4 import Int4Cpu
from runtime.kernels.cpu.int8 import Int8Cpu
from runtime.kernels.cpu.w8a8 import W8A8Cpu
from runtime.kernels.cuda.fp8 import Float8Cuda
from runtime.kernels.reference import Reference
from runtime.kernels.triton.codebooks import KQuantTriton, RowCodebookTriton
from runtime.kernels.triton.linear import (
    BlockFloatTriton,
    Float8BlockTriton,
    RoundedTriton,
    Sparse24Triton,
    W4A16Triton,
    W8A8Triton,
    W8A16Triton,
)

__all__ = [
    "CLASSES", "KERNELS", "MODES", "REFERENCE", "Choice", "Kernel", "Layer", "ShapeClass", "candidates", "check_name", "find", "names",
    "on_gpu", "reference", "shape_class", "warn_of_reference",
]  # fmt: skip

REFERENCE = Reference()
#: What `kernels=` may be besides a kernel's name: the best exact ones, or any that are faster.
MODES = ("auto", "fast")
#: In order of preference.
KERNELS: tuple[Kernel, ...] = (
    *integer.KERNELS, Float8Cpu(), DFloat11Cpu(), TernaryCpu(), Int4Cpu(), Int8Cpu(), W8A8Cpu(),
    # 2:4 comes after the dense kernel: it reads a quarter less and computes more (unmeasured on GPUs).
    Float8Cuda(), W8A8Triton(), Float8BlockTriton(), RoundedTriton(), W4A16Triton(), Sparse24Triton(), W8A16Triton(), BlockFloatTriton(),
    RowCodebookTriton(), KQuantTriton(),
    REFERENCE,
)  # fmt: skip
_log = logging.getLogger("compress.kernels")


def names() -> list[str]:
    """Names of all kernels, fastest first."""
    return list(dict.fromkeys(kernel.name for kernel in KERNELS))


def candidates(layer: Layer) -> list[Kernel]:
    """Kernels that can compute the layer, best first; the reference always ends the list."""
    return [kernel for kernel in KERNELS if _why_not(kernel, layer) is None]


def on_gpu(layer: Layer) -> list[Kernel]:
    """Exact kernels that could compute a layer, which is on meta, on a GPU that is not here (`triton.gpu.assuming`), best first."""
    return [
        kernel
        for kernel in KERNELS
        if kernel.device in (None, "cuda") and kernel.accuracy == "exact" and layer.entry.format in kernel.formats
        and kernel.why_not(layer) is None
    ]  # fmt: skip


def reference() -> Choice:
    """The reference for every shape class."""
    return Choice(REFERENCE, REFERENCE, REFERENCE)


def find(layer: Layer, kernels: str = "auto") -> Choice:
    """The kernels for a layer.

    Args:
        layer: what is to be computed.
        kernels: "auto": the best exact ones, "fast": also those that round activations further, each in place of the exact one
            that serves the same shape classes (so that layers do not differ in how they round), or a kernel's name: that one
            for the shape classes it serves, the best exact ones of its layout for the others.

    Raises:
        RequestError: there is no kernel of that name, or it cannot compute this layer.
    """
    if kernels not in MODES:
        return _named(layer, kernels)
    able = candidates(layer)
    exact = [kernel for kernel in able if kernel.accuracy == "exact"]
    ranked = exact if kernels == "auto" else [k for k in able if k.accuracy == "fast"] + exact
    leader = next(kernel for kernel in ranked if "decode" in kernel.classes)
    members = [kernel for kernel in ranked if kernel.layout == leader.layout]
    replaced = {kernel.classes for kernel in members if kernel.accuracy == "fast"}
    members = [kernel for kernel in members if kernel.accuracy == "fast" or kernel.classes not in replaced]
    chosen = {}
    for rows in CLASSES:
        serving = [kernel for kernel in members if rows in kernel.classes]
        chosen[rows] = tuning.fastest(layer, rows, serving)
    return Choice(**chosen)


def warn_of_reference(computed: Iterable[tuple[Layer, Choice]]) -> None:
    """Say in the log, once for all these layers of a model, how many the reference was left with and why."""
    layers = list(computed)
    reasons = Counter(_why_reference(layer) for layer, choice in layers if choice.decode is REFERENCE)
    if reasons:
        said = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
        _log.warning(
            "%d of %d compressed layers are computed by the reference, which dequantizes the whole weight at every call: %s",
            reasons.total(), len(layers), said,
        )  # fmt: skip


def _why_reference(layer: Layer) -> str:
    reasons: dict[str, str] = {}
    for kernel in KERNELS:
        reads = layer.entry.format in kernel.formats and kernel.device == layer.device.type
        if reads and kernel.accuracy == "exact" and "decode" in kernel.classes:
            reasons.setdefault(kernel.why_not(layer) or "", kernel.name)
    if not reasons:
        return f"no kernel reads format {layer.entry.format} on {layer.device.type}"
    return ", ".join(f"{name} says: {reason}" for reason, name in reasons.items() if reason)


def check_name(kernels: str) -> None:
    """RequestError unless it is what `find` takes."""
    known = [*MODES, *names()]
    if kernels not in known:
        raise RequestError(f"unknown kernel {kernels!r}, known: {', '.join(known)}{did_you_mean(kernels, known)}")


def _named(layer: Layer, name: str) -> Choice:
    check_name(name)
    same = [kernel for kernel in KERNELS if kernel.name == name]
    reasons = [_why_not(kernel, layer) for kernel in same]
    if None not in reasons:
        raise RequestError(f"kernel {name} cannot compute this layer: {reasons[0]}")
    leader = same[reasons.index(None)]
    others = [k for k in candidates(layer) if k.layout == leader.layout and k.accuracy == "exact"]
    serving = {rows: next((k for k in (leader, *others) if rows in k.classes), leader) for rows in CLASSES}
    return Choice(**serving)


def _why_not(kernel: Kernel, layer: Layer) -> str | None:
    if kernel.device is not None and layer.device.type != kernel.device:
        return f"it runs on {kernel.device}, the layer is on {layer.device.type}"
    if layer.entry.format not in kernel.formats:
        return f"it does not read format {layer.entry.format}"
    return kernel.why_not(layer)
