"""Kernels compiled ahead of time: found by what a launch needs, loaded and launched by the CUDA driver without a compiler.

`<directory>/kernels/index.json` says for every file of `kernels/` which GPU, kernel, argument types, constants and options it is
for (`export/triton_aot` writes it). Loading a directory offers them to all launches of the process: a variant is taken for what it
was compiled for, whichever model it came with. Code of a cubin runs on the GPU with the memory of this process there, so an export
is to be trusted as a program is; its hashes show damage, not origin.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.errors import CompressError
from runtime.kernels.triton import jit, signature
from runtime.kernels.triton.cubins import Cubin, read_cubin, read_index, runs_on
from runtime.kernels.triton.signature import Variant

_PLAIN_SHARED = 48 << 10  # bytes that a function may use without asking
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_STATIC_SHARED, _DYNAMIC_SHARED = 1, 8  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, ..._MAX_DYNAMIC_SHARED_SIZE_BYTES
_MOST_THREADS = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_OPT_IN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_log = logging.getLogger("compress.kernels")


class CudaDriver:
    """The CUDA driver of the machine, by ctypes.

    What Triton 3.6 to 3.9 do in `backends/nvidia/driver.c` (`loadBinary`) and in their launcher: every program has 32
    threads a warp, dynamic shared memory above 48 KiB is asked for once a function, and the arguments are followed by pointers to
    scratch memory, which our kernels have none of.

    Args:
        library: file of the driver library.

    Attributes:
        device_type: of the tensors that it can take.

    Raises:
        CompressError: there is none.
    """

    device_type = "cuda"

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda: Any = ctypes.CDLL(library)
        except OSError as error:
            raise CompressError(f"the CUDA driver cannot be loaded: {error}") from error
        u, p = ctypes.c_uint, ctypes.c_void_p
        self._cuda.cuLaunchKernel.argtypes = [p, u, u, u, u, u, u, u, p, p, p]
        self._contexts: dict[int, int] = {}

    def capability(self, device: int) -> int:
        """Compute capability, such as 90."""
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor

    def current(self) -> tuple[int, int]:
        """Device and stream that torch computes on now."""
        device = torch.cuda.current_device()
        return device, torch.cuda.current_stream(device).cuda_stream

    def load(self, device: int, cubin: bytes, name: str, shared: int, threads: int) -> int:
        """The function `name` of a cubin, for launches with so much dynamic shared memory and so many threads.

        It is never unloaded: CUDA graphs may hold it.
        """
        self._enter(device)
        module = self._pointer("cuModuleLoadData", ctypes.c_char_p(cubin))
        function = self._pointer("cuModuleGetFunction", module, name.encode())
        most = self._number("cuFuncGetAttribute", _MOST_THREADS, function)
        if threads > most:
            raise CompressError(f"kernel {name} wants {threads} threads a program, this GPU gives it {most}")
        limit = self._number("cuDeviceGetAttribute", _OPT_IN, self._number("cuDeviceGet", device))
        if shared > max(limit, _PLAIN_SHARED):
            raise CompressError(f"kernel {name} wants {shared} bytes of shared memory, this GPU has {limit}")
        if shared > _PLAIN_SHARED:
            self._call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
            room = limit - self._number("cuFuncGetAttribute", _STATIC_SHARED, function)
            self._call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, room)
        assert function.value is not None
        return function.value

    def launch(
        self, device: int, function: int, grid: Sequence[int], threads: int, shared: int, stream: int, slots: bytearray
    ) -> None:
        """Launch it. `slots`: the arguments, each at the beginning of eight bytes."""
        self._enter(device)
        count = len(slots) // 8
        values = (ctypes.c_uint64 * count).from_buffer(slots)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        # The driver copies the arguments before it returns.
        self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared, stream, ctypes.addressof(pointers), None)

    def _enter(self, device: int) -> None:
        """Make the context that torch uses on the device this thread's; it usually is already."""
        mine = self._contexts.get(device)
        if mine is None:
            self._call("cuInit", 0)
            context = self._pointer("cuDevicePrimaryCtxRetain", self._number("cuDeviceGet", device))
            assert context.value is not None
            mine = self._contexts[device] = context.value
        if self._pointer("cuCtxGetCurrent").value != mine:
            self._call("cuCtxSetCurrent", ctypes.c_void_p(mine))

    def _number(self, name: str, *arguments: Any) -> int:
        """What a function of the driver writes to its first argument, an integer."""
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _pointer(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Likewise, a pointer."""
        value = ctypes.c_void_p()
        self._call(name, ctypes.byref(value), *arguments)
        return value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode(errors="replace") if text.value else f"error {status}"
            raise CompressError(f"{name} of the CUDA driver failed: {said}")


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
