"""The network definition: what is added is recorded."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from fake_tensorrt.listing import LISTING, Listed, bind, enums

TYPE = enums()["DataType"]
BITS = {
    "FLOAT": 32, "HALF": 16, "BF16": 16, "INT8": 8, "INT32": 32, "INT64": 64, "BOOL": 8, "UINT8": 8, "FP8": 8, "INT4": 4, "FP4": 4,
}  # fmt: skip


class Weights(Listed):
    _name = "Weights"

    def _start(self, **arguments: Any) -> None:
        self._pointer, self._count = arguments["ptr"], arguments["count"]
        self._kind = arguments["type"]

    def _read(self) -> bytes:
        """The bytes now behind the pointer."""
        size = (self._count * BITS[self._kind.name] + 7) // 8
        return bytes((ctypes.c_char * size).from_address(self._pointer))

    @property
    def size(self) -> int:
        return int(self._count)


class ITensor(Listed):
    """`dtype` and `shape` (-1 where free) are set when shapes are propagated, which the builder does."""

    _name = "ITensor"

    def do_set_dimension_name(self, index: int, name: str) -> None:
        self._state.setdefault("_dimensions", {})[index] = name


class INetworkDefinition(Listed):
    _name = "INetworkDefinition"

    @classmethod
    def _empty(cls) -> Any:
        made = cls._make()
        made._layers, made._inputs, made._outputs, made._names, made._onnx = [], [], [], {}, None
        return made

    def __getattr__(self, name: str) -> Any:
        if name in ("num_inputs", "num_outputs", "num_layers"):
            return len({"num_inputs": self._inputs, "num_outputs": self._outputs, "num_layers": self._layers}[name])
        return super().__getattr__(name)

    def _call(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not name.startswith("add_") or name == "add_input":
            return super()._call(name, args, keywords)
        arguments = bind(self._name, name, args, keywords)
        kind = LISTING["classes"][self._name]["methods"][name][0]["returns"]
        layer = LAYERS[kind]._make()
        layer._kind, layer._arguments, layer._inputs = name.removeprefix("add_"), arguments, {}
        output = ITensor._make()
        output._source, layer._output = layer, output
        self._layers.append(layer)
        return layer

    def do_add_input(self, name: str, dtype: Any, shape: Any) -> Any:
        tensor = ITensor._make(name=name, dtype=dtype, shape=tuple(shape))
        tensor._source = None
        self._inputs.append(tensor)
        return tensor

    def do_mark_output(self, tensor: Any) -> None:
        self._outputs.append(tensor)

    def do_set_weights_name(self, weights: Any, name: str) -> bool:
        if name in self._names:
            return False
        self._names[name] = weights
        return True

    def do_get_input(self, index: int) -> Any:
        return self._inputs[index]

    def do_get_output(self, index: int) -> Any:
        return self._outputs[index]

    def do_get_layer(self, index: int) -> Any:
        return self._layers[index]


def _layer(kind: str) -> type:
    """A layer class; `IAttention` is none in the bindings, but has the same methods."""

    def get_output(self: Any, index: int) -> Any:
        assert index == 0
        return self._output

    def set_input(self: Any, index: int, tensor: Any) -> None:
        self._inputs[index] = tensor

    return type(kind, (Listed,), {"_name": kind, "do_get_output": get_output, "do_set_input": set_input})


_KINDS = {
    overloads[0]["returns"]
    for name, overloads in LISTING["classes"]["INetworkDefinition"]["methods"].items()
    if name.startswith("add_") and overloads
} - {"ITensor"}
LAYERS = {kind: _layer(kind) for kind in _KINDS if kind in LISTING["classes"]}


class Permutation(Listed):
    _name = "Permutation"

    def __init__(self, order: list[int]) -> None:
        self._state, self._order = {}, [int(i) for i in order]

    def __iter__(self) -> Any:
        return iter(self._order)


def values_of(weights: Any) -> np.ndarray[Any, Any]:
    """Raw bytes as uint8."""
    return np.frombuffer(weights._read(), np.uint8)


CLASSES = (Weights, ITensor, INetworkDefinition, Permutation, *LAYERS.values())
