"""Runtime, engine, context and refitter: tensors are read and written at the addresses that were bound, with torch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fake_tensorrt.builder import PLANS, constant
from fake_tensorrt.compute import TORCH, run
from fake_tensorrt.listing import Listed
from fake_tensorrt.network import values_of

SCRATCH = 1 << 12


class Runtime(Listed):
    _name = "Runtime"

    def do_deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
        content = bytes(serialized_engine)
        if not content.startswith(b"plan "):
            return None
        made = ICudaEngine._make(device_memory_size_v2=SCRATCH, num_layers=7, streamable_weights_size=1 << 20)
        made._plan = PLANS[int(content[5:])]
        made._stripped = "STRIP_PLAN" in made._plan["config"]._flags
        made._weights = {} if made._stripped else dict(made._plan["weights"])
        made._session = None if made._stripped else made._plan["network"]._onnx
        return made


class ICudaEngine(Listed):
    _name = "ICudaEngine"

    def do_create_execution_context(self, strategy: Any = None) -> Any:
        made = IExecutionContext._make()
        made._engine, made._shapes, made._addresses, made._profile, made._runs = self, {}, {}, 0, 0
        return made

    def do_get_engine_stat(self, stat: Any) -> int:
        return sum(len(data) for _, data in self._weights.values())

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
        self._runs += 1
        network = self._engine._plan["network"]
        given = {t.name: self._at(t.name, self._shapes[t.name], TORCH[t.dtype.name]) for t in network._inputs}
        found = self._through_onnx(given) if network._onnx is not None else self._through_layers(network, given)
        for tensor in network._outputs:
            value = found[tensor.name]
            place = self._at(tensor.name, tuple(value.shape), value.dtype)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
            else:
                assert tensor.name.startswith("cache_out."), "only caches are written in place"
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

    def _through_layers(self, network: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        table = {tensor: given[tensor.name] for tensor in network._inputs}
        weights = self._engine._weights

        def value(layer: Any) -> torch.Tensor:
            return constant(layer, weights[layer.name][1])

        for layer in network._layers:
            table[layer._output] = run(layer, table.__getitem__, value)
        for tensor in network._outputs:  # TensorRT wants a cache's output where its input is
            if tensor.name.startswith("cache_out."):
                twin = tensor.name.replace("cache_out.", "cache.")
                assert self._addresses[tensor.name] == self._addresses[twin], f"{tensor.name} is not at {twin}"
        return {tensor.name: table[tensor] for tensor in network._outputs}

    def _through_onnx(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        session = self._engine._session
        names = [output.name for output in session.get_outputs()]
        results = session.run(names, {name: value.numpy() for name, value in given.items()})
        return {name: torch.from_numpy(value) for name, value in zip(names, results, strict=True)}


class Refitter(Listed):
    _name = "Refitter"

    def _start(self, engine: Any, logger: Any) -> None:
        self._engine, self._given = engine, {}

    def do_get_all_weights(self) -> list[str]:
        return list(self._engine._plan["weights"])

    def do_get_missing_weights(self) -> list[str]:
        """As documented: what those that were given need beside them; nothing before one is given."""
        if not self._given:
            return []
        return [name for name in self.do_get_all_weights() if name not in self._given]

    def do_set_named_weights(self, name: str, weights: Any) -> bool:
        kind, data = self._engine._plan["weights"][name]
        if weights._kind.name != kind or len(weights._read()) != len(data):
            return False
        self._given[name] = weights
        return True

    def do_refit_cuda_engine(self) -> bool:
        self._engine._weights |= {name: (w._kind.name, values_of(w).copy()) for name, w in self._given.items()}
        return True
