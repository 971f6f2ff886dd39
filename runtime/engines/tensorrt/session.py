"""TensorRT engine with its execution contexts; tensors are bound by address."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runtime.errors import ArtifactError, CompressError

_log = logging.getLogger("compress.tensorrt")
PREFILL, DECODE = 0, 1  # profiles, as export.tensorrt.profiles numbers them
DTYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64,
    "BOOL": torch.bool,
}  # fmt: skip


class Gpu:
    """The stream that an engine works on; the caller's stream waits for it and it for the caller's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        """What TensorRT calls a stream."""
        return int(self._stream.cuda_stream)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return int(major), int(minor)

    @contextmanager
    def work(self) -> Iterator[None]:
        """The device is the current one; what is enqueued inside sees what was computed before, and is done for what comes after."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until the stream has finished."""
        self._stream.synchronize()


class Session:
    """A deserialized engine and a context a profile; they share their scratch memory, because one step runs at a time.

    Args:
        trt: the tensorrt module. engine: its `ICudaEngine`. gpu: where it runs.
        owners: what must live as long as the engine (TensorRT's runtime and logger).
    """

    def __init__(self, trt: Any, engine: Any, gpu: Gpu, owners: tuple[Any, ...]) -> None:
        self.trt, self.engine, self.gpu, self._owners = trt, engine, gpu, owners
        self._scratch = torch.empty(max(1, int(engine.device_memory_size_v2)), dtype=torch.uint8, device=gpu.device)
        self._contexts = [self._context(profile) for profile in (PREFILL, DECODE)]

    def _context(self, profile: int) -> Any:
        context = self.engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise CompressError("TensorRT made no execution context; there may be too little GPU memory")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        if not context.set_optimization_profile_async(profile, self.gpu.handle):
            raise CompressError(f"TensorRT refused profile {profile}")
        self.gpu.synchronize()
        return context

    def run(self, profile: int, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Compute `outputs` in place. Tensors are contiguous and on the GPU.

        Raises:
            CompressError: a shape outside the profile, or TensorRT failed.
        """
        context = self._contexts[profile]
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise CompressError(f"{name} of shape {list(tensor.shape)} lies outside the engine's profile {profile}")
        for name, tensor in [*inputs.items(), *outputs.items()]:
            # An empty tensor has no memory, and TensorRT wants an address all the same.
            if not context.set_tensor_address(name, tensor.data_ptr() or self._scratch.data_ptr()):
                raise CompressError(f"TensorRT refused the address of {name}")
        vague = context.infer_shapes()
        if vague:
            raise CompressError(f"the engine wants a tensor that was not given: {vague[0]}")
        with self.gpu.work():
            if not context.execute_async_v3(self.gpu.handle):
                raise CompressError("TensorRT failed to run the engine; its log says why")


def make_logger(trt: Any, log: Callable[[int, str], None] = _log.log) -> Any:
    """An `ILogger` that passes on levels of `logging` and texts, by default to the log `compress.tensorrt`."""
    levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            log(levels.get(severity.name, logging.DEBUG), " ".join(msg.split()))

    return Logger()


def deserialize(trt: Any, logger: Any, plan: Path, own_code: bool) -> tuple[Any, Any]:
    """The runtime and the engine of a plan, which is mapped, not read.

    Args:
        own_code: the plan brings a lean runtime along (version compatible plans do), which is code that is run.

    Raises:
        ArtifactError: the file is missing, or TensorRT cannot use it.
    """
    runtime = trt.Runtime(logger)
    if own_code:
        runtime.engine_host_code_allowed = True
    try:
        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            engine = runtime.deserialize_cuda_engine(content)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{plan} cannot be read: {error}") from error
    if engine is None:
        raise ArtifactError(f"TensorRT cannot use {plan}: another version, another GPU, or a damaged file; see its log")
    return runtime, engine
