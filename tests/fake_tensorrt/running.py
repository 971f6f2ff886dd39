"""Runtime, engine, context and refitter: tensors are read and written at the addresses that were bound, with torch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fake_tensorrt.builder import PLANS
from fake_tensorrt.listing import Listed
from fake_tensorrt.network import TORCH

SCRATCH = 1 << 12
CURRENT: list[object] = []  # GPUs that are the current one, the last of them now


class Runtime(Listed):
    _name = "Runtime"

    def do_deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
        assert CURRENT, "loaded into whatever device is the current one"
        content = bytes(serialized_engine)
        if not content.startswith(b"plan "):
            return None
        made = ICudaEngine._make(device_memory_size_v2=SCRATCH, num_layers=7, streamable_weights_size=1 << 20)
        made._plan = PLANS[int(content[5:])]
        made._stripped = "STRIP_PLAN" in made._plan["config"]._flags
        made._session = None if made._stripped else made._plan["network"]._onnx
        return made


class ICudaEngine(Listed):
    _name = "ICudaEngine"

    def do_create_execution_context(self, strategy: Any = None) -> Any:
        assert CURRENT, "made on whatever device is the current one"
        made = IExecutionContext._make()
        made._engine, made._shapes, made._addresses, made._profile = self, {}, {}, 0
        return made

    def do_get_engine_stat(self, stat: Any) -> int:
        return 0 if self._session is None else 1 << 16

    def do_get_weight_streaming_automatic_budget(self) -> int:
        return 4321


class IExecutionContext(Listed):
    _name = "IExecutionContext"

    def do_set_device_memory(self, memory: int, size: int) -> None:
        assert memory
        assert size >= SCRATCH

    def do_set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return profile_index < len(self._engine._plan["config"]._profiles)

    def do_set_input_shape(self, name: str, shape: Any) -> bool:
        least, _, most = self._engine._plan["config"]._profiles[self._profile][name]
        fits = len(shape) == len(least) and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))
        if fits:
            self._shapes[name] = tuple(shape)
        return fits

    def do_set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory != 0

    def do_infer_shapes(self) -> list[str]:
        network = self._engine._plan["network"]
        return [t.name for t in network._inputs if t.name not in self._shapes or t.name not in self._addresses]

    def do_execute_async_v3(self, stream_handle: int) -> bool:
        assert CURRENT, "run on whatever device is the current one"
        network, session = self._engine._plan["network"], self._engine._session
        assert session is not None, "a stripped plan was not refitted"
        given = {t.name: self._at(t.name, self._shapes[t.name], TORCH[t.dtype.name]) for t in network._inputs}
        names = [tensor.name for tensor in network._outputs]
        results = session.run(names, {name: value.numpy() for name, value in given.items()})
        for name, value in zip(names, map(torch.from_numpy, results), strict=True):
            self._at(name, tuple(value.shape), value.dtype).copy_(value)
        return True

    def _at(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory that is bound to a name."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(self._addresses[name])
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class Refitter(Listed):
    _name = "Refitter"

    def _start(self, engine: Any, logger: Any) -> None:
        self._engine = engine

    def do_get_missing_weights(self) -> list[str]:
        return []

    def do_refit_cuda_engine(self) -> bool:
        return True
