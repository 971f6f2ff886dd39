"""Kernels compiled ahead: found by what a launch needs, and launched without a compiler.

`<directory>/kernels/index.json` says for every file of `kernels/` which GPU, kernel, argument types, constants and options it is
for (`export/triton_aot` writes it). Loading a directory offers them to all launches of the process: a variant is taken for what it
was compiled for, whichever model it came with. Code of a cubin runs on the GPU with the memory of this process there, so an export
is to be trusted as a program is; its hashes show damage, not origin.
"""

from __future__ import annotations

import importlib
import logging
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.kernels.triton import jit, signature
from runtime.kernels.triton.cubins import Cubin, read_cubin, read_index, runs_on
from runtime.kernels.triton.driver import CudaDriver
from runtime.kernels.triton.signature import Variant

_log = logging.getLogger("compress.kernels")


class Loaded:
    """Every cubin offered to this process that the GPU in question can run, and their functions once they are needed.

    Attributes:
        answers: of `missing`.
        missed: launches that found nothing.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.answers: dict[tuple[torch.device, Hashable], str | None] = {}
        self.missed: set[Variant] = set()
        self._lock = threading.Lock()
        self._offered: dict[tuple[int, str], dict[Variant, tuple[Cubin, bytes]]] = {}  # by capability and kernel
        self._found: dict[tuple[int, Variant], tuple[Cubin, bytes] | None] = {}
        self._functions: dict[tuple[int, str, str], int] = {}

    def add(self, capability: int, cubins: Sequence[tuple[Cubin, bytes]]) -> None:
        """Offer cubins to GPUs of this compute capability."""
        with self._lock:
            for cubin, data in cubins:
                there = self._offered.setdefault((capability, cubin.variant.kernel), {})
                there.setdefault(cubin.variant, (cubin, data))
            self._found.clear()
            self.answers.clear()

    def offers(self, device: int) -> bool:
        """Whether there is anything for this device."""
        return any(capability == self.driver.capability(device) for capability, _ in self._offered)

    def find(self, device: int, call: Variant) -> tuple[Cubin, bytes] | None:
        """The cubin that assumes most, of those that are right for this launch."""
        if (device, call) not in self._found:
            offered = self._offered.get((self.driver.capability(device), call.kernel), {})
            fitting = [pair for variant, pair in offered.items() if variant.serves(call)]
            self._found[device, call] = max(fitting, key=lambda pair: pair[0].variant.assumptions, default=None)
        return self._found[device, call]

    def launch(self, kernel: jit.Entry, grid: Sequence[int], arguments: dict[str, Any]) -> bool:
        """Launch it, or return False where there is no cubin for it; see `jit.Entry.launcher`."""
        first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
        if first is None or first.device.type != self.driver.device_type:
            return False
        device, stream = self.driver.current()
        call = signature.specialize(kernel, arguments)
        found = self.find(device, call)
        if found is None:
            self._complain(device, call)
            return False
        cubin, data = found
        blocks = (*grid, 1, 1)[:3]
        if 0 not in blocks:
            function = self._function(device, cubin, data)
            slots = pack(cubin, arguments)
            self.driver.launch(device, function, blocks, cubin.threads, cubin.shared, stream, slots)
        return True

    def _function(self, device: int, cubin: Cubin, data: bytes) -> int:
        key = (device, cubin.sha256, cubin.symbol)
        with self._lock:
            if key not in self._functions:
                self._functions[key] = self.driver.load(device, data, cubin.symbol, cubin.shared, cubin.threads)
            return self._functions[key]

    def _complain(self, device: int, call: Variant) -> None:
        if call in self.missed or not self.offers(device):
            return
        self.missed.add(call)
        instead = "triton compiles it now" if jit.INSTALLED else "triton is not installed, so something slower computes"
        _log.warning("no kernel compiled ahead is right for %s: %s", call.describe(), instead)


_loaded: Loaded | None = None


def offer(directory: Path, device: torch.device, driver: CudaDriver | None = None) -> int:
    """Let launches on `device` use the kernels in `directory`, if it has any; returns how many fit.

    Kernels whose sources differ from this runtime's are not used, and the log says so.

    Args:
        driver: instead of the machine's.

    Raises:
        ArtifactError: the index or a cubin for this GPU is damaged.
    """
    global _loaded
    cubins = read_index(directory)
    if not cubins:
        return 0
    if _loaded is None or (driver is not None and _loaded.driver is not driver):
        _loaded = Loaded(driver or CudaDriver())
    capability = _loaded.driver.capability(_index(_loaded, device))
    mine = [cubin for cubin in cubins if runs_on(cubin.architecture, capability)]
    if not mine:
        there = ", ".join(sorted({cubin.architecture for cubin in cubins}))
        _log.warning(
            "%s has kernels compiled ahead for %s, and none for this GPU (sm_%d)", directory, there, capability
        )
        return 0
    content = [(cubin, read_cubin(directory, cubin)) for cubin in mine]
    for module in jit.MODULES:
        importlib.import_module(module)
    current = {name: entry.source for name, entry in jit.Entry.known.items()}
    usable = [(cubin, data) for cubin, data in content if current.get(cubin.variant.kernel) == cubin.source]
    stale = sorted({cubin.variant.kernel for cubin in mine if current.get(cubin.variant.kernel) != cubin.source})
    if stale:
        _log.warning(
            "kernels in %s were compiled from other sources than this runtime has, and are not used: %s; export again",
            directory, ", ".join(stale),
        )  # fmt: skip
    _loaded.add(capability, usable)
    jit.Entry.launcher = _loaded.launch
    return len(usable)


def withdraw() -> None:
    """Forget everything offered; launches are Triton's again."""
    global _loaded
    _loaded = jit.Entry.launcher = None


def missed() -> int:
    """How many different launches found nothing so far."""
    return 0 if _loaded is None else len(_loaded.missed)


def offers(device: torch.device) -> bool:
    """Whether any kernel compiled ahead can be launched on this device."""
    if _loaded is None or device.type != _loaded.driver.device_type:
        return False
    return _loaded.offers(_index(_loaded, device))


def missing(call: Callable[[], Any], device: torch.device, remember: Hashable = None) -> str | None:
    """The first launch of `call`, none of which is run, that no kernel compiled ahead is right for; None: all are there.

    Args:
        remember: what names the call, to answer the same again without recording it.
    """
    loaded = _loaded
    if loaded is not None and remember is not None and (device, remember) in loaded.answers:
        return loaded.answers[device, remember]
    with jit.recording() as launches:
        call()
    if loaded is None:
        return launches[0].kernel.name if launches else None
    index = _index(loaded, device)
    variants = (signature.of(launch) for launch in launches)
    answer = next((variant.describe() for variant in variants if loaded.find(index, variant) is None), None)
    if remember is not None:
        loaded.answers[device, remember] = answer
    return answer


def pack(cubin: Cubin, arguments: dict[str, Any]) -> bytearray:
    """Arguments of a launch as the driver takes them: each at the beginning of eight bytes, scratch pointers (null) at the end."""
    passed = cubin.variant.passed
    slots = bytearray(8 * (len(passed) + cubin.scratch_pointers))
    for place, (name, kind) in enumerate(passed):
        value = arguments[name]
        value = value.data_ptr() if isinstance(value, torch.Tensor) else value
        struct.pack_into(signature.SCALARS.get(kind, "<Q"), slots, 8 * place, value)
    return slots


def _index(loaded: Loaded, device: torch.device) -> int:
    return device.index if device.index is not None else loaded.driver.current()[0]
