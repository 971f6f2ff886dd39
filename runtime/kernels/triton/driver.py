"""Loading and launching cubins through the CUDA driver, with ctypes: no compiler, no triton.

What triton 3.5 and 3.6 do in `backends/nvidia/driver.c` (`loadBinary`) and in the launcher they generate: every program has 32
threads a warp, dynamic shared memory above 48 KiB is asked for once a function, and the arguments are followed by pointers to
scratch memory, which our kernels have none of.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from runtime.errors import CompressError

Handle = int
PLAIN_SHARED = 48 << 10  # bytes that a function may use without asking
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_STATIC_SHARED, _DYNAMIC_SHARED = 1, 8  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, ..._MAX_DYNAMIC_SHARED_SIZE_BYTES
_MOST_THREADS = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_OPT_IN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


class CudaDriver:
    """The driver of the machine.

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
        self._lock = threading.Lock()
        self._modules: list[ctypes.c_void_p] = []  # never unloaded: graphs may hold their functions

    def capability(self, device: int) -> int:
        """Compute capability, such as 90."""
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor

    def current(self) -> tuple[int, int]:
        """Device and stream that torch computes on now."""
        device = torch.cuda.current_device()
        return device, torch.cuda.current_stream(device).cuda_stream

    def load(self, device: int, cubin: bytes, name: str, shared: int, threads: int) -> Handle:
        """The function `name` of a cubin, for launches with so much dynamic shared memory and so many threads."""
        self._enter(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        self._modules.append(module)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        assert function.value is not None
        most = self._attribute(function, _MOST_THREADS)
        if threads > most:
            raise CompressError(f"kernel {name} wants {threads} threads a program, this GPU gives it {most}")
        limit = self._device_attribute(device, _OPT_IN)
        if shared > max(limit, PLAIN_SHARED):
            raise CompressError(f"kernel {name} wants {shared} bytes of shared memory, this GPU has {limit}")
        if shared > PLAIN_SHARED:
            self._call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
            room = limit - self._attribute(function, _STATIC_SHARED)
            self._call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, room)
        return function.value

    def launch(
        self,
        device: int,
        function: Handle,
        grid: Sequence[int],
        threads: int,
        shared: int,
        stream: int,
        slots: bytearray,
    ) -> None:
        """Launch it. `slots`: the arguments, each at the beginning of eight bytes."""
        self._enter(device)
        count = len(slots) // 8
        values = (ctypes.c_uint64 * count).from_buffer(slots)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        # The driver copies the arguments before it returns.
        self._check("cuLaunchKernel", self._cuda.cuLaunchKernel(
            function, *grid, threads, 1, 1, shared, stream, ctypes.addressof(pointers), None
        ))  # fmt: skip

    def _enter(self, device: int) -> None:
        """Make the context that torch uses on the device this thread's; it usually is already."""
        mine, here = self._contexts.get(device), ctypes.c_void_p()
        if mine is None:
            with self._lock:
                handle, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuInit", 0)
                self._call("cuDeviceGet", ctypes.byref(handle), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                assert context.value is not None
                mine = self._contexts[device] = context.value
        self._call("cuCtxGetCurrent", ctypes.byref(here))
        if here.value != mine:
            self._call("cuCtxSetCurrent", ctypes.c_void_p(mine))

    def _attribute(self, function: ctypes.c_void_p, which: int) -> int:
        value = ctypes.c_int()
        self._call("cuFuncGetAttribute", ctypes.byref(value), which, function)
        return value.value

    def _device_attribute(self, device: int, which: int) -> int:
        handle, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, handle)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode(errors="replace") if text.value else f"error {status}"
            raise CompressError(f"{name} of the CUDA driver failed: {said}")
