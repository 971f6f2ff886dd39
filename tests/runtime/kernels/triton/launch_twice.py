"""Launch kernels by triton's own launcher and by ours over a CUDA driver that only writes down (`fake_cuda.c`).

`python launch_twice.py FOLDER`, FOLDER with libcuda.so.1 and in LD_LIBRARY_PATH. One line of JSON a launch, two lines a kernel.
Pointers are made up: nothing reads them.
"""

import ctypes
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gpu_launches
import torch

from export.triton_aot.worker import compile_variant
from runtime.kernels.triton import signature
from runtime.kernels.triton.aot import CudaDriver, pack
from runtime.kernels.triton.cubins import Cubin

STREAM, DEVICE = 0x5EED, 0


@dataclass
class Pointer:
    """What triton takes for a tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Tensor(torch.Tensor):
    """An empty tensor that says it is somewhere else."""

    address = 0

    def data_ptr(self) -> int:
        return self.address


def main(folder: str) -> None:
    fake = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime.driver import driver as triton_driver

    driver, utils = CudaDriver(f"{folder}/libcuda.so.1"), CudaUtils()
    triton_driver.set_active(SimpleNamespace(utils=utils))  # where a launcher of 3.7 and later looks for them
    calls = gpu_launches.hot_launches()
    for name in ("w4a16 512", "swiglu", "rms_norm"):
        launch = gpu_launches.record(calls[name][0], 90)[0]
        variant = signature.of(launch)
        kernel = compile_variant(variant, 90)
        data, meta = kernel.asm["cubin"], kernel.metadata
        sizes = [*variant.sizes, 8, 8]  # and two pointers to scratch memory
        fake.fake_sizes(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        grid = (*launch.grid, 1, 1)[:3]
        theirs: dict[str, Any] = {}
        ours: dict[str, Any] = {}
        for place, (each, value) in enumerate(launch.arguments.items()):
            theirs[each] = ours[each] = value
            if isinstance(value, torch.Tensor):
                address = 0x7F00_0000_0000 + 4096 * (place + 1)
                theirs[each], ours[each] = Pointer(address), torch.empty(0, dtype=value.dtype).as_subclass(Tensor)
                ours[each].address = address
        # As `CompiledKernel._init_handles` and `JITFunction.run` do, with what the kernel was compiled from.
        _, function, *_ = utils.load_binary(meta.name, data, meta.shared, DEVICE)
        launcher = CudaLauncher(kernel.src, meta)
        values = [theirs[parameter.name] for parameter in launch.kernel.jitted.params]
        launcher(*grid, STREAM, function, kernel.packed_metadata, None, None, None, *values)
        made = Cubin(variant, "", "", "sm_90a", "", meta.name, meta.shared, meta.num_warps, 2)
        handle = driver.load(DEVICE, data, meta.name, made.shared, made.threads)
        driver.launch(DEVICE, handle, grid, made.threads, made.shared, STREAM, pack(made, ours))


if __name__ == "__main__":
    main(sys.argv[1])
