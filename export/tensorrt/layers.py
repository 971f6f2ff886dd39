"""TensorRT's network API in the words of a decoder: constants by name, linear layers, norms. Every refusal is an error with a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from export.tensorrt.weights import OnnxWeights, Weight
from runtime.errors import CompressError

#: TensorRT `DataType` member -> torch dtype, for constants that are computed here.
TORCH = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT64": torch.int64}


class Layers:
    """A network that grows.

    Args:
        trt: the tensorrt module. network: an empty `INetworkDefinition`.
        weights: where constants come from.
        dtype: `DataType` member that floats are computed in.

    Attributes:
        used: {name: constant} of everything that is in the network; it must outlive the build, because TensorRT keeps pointers.
    """

    def __init__(self, trt: Any, network: Any, weights: OnnxWeights, dtype: str) -> None:
        self.trt, self.network, self.weights, self.dtype = trt, network, weights, dtype
        self.used: dict[str, Weight] = {}
        self._constants: dict[str, Any] = {}

    # ---------------------------------------------------------------- plumbing
    def type(self, name: str) -> Any:
        return getattr(self.trt.DataType, name)

    def output(self, layer: Any, name: str) -> Any:
        """The only output of a layer, which is given a name; CompressError where TensorRT refused the layer."""
        if layer is None:
            raise CompressError(f"TensorRT refused layer {name}; its log above says why")
        layer.name = name
        tensor = layer.get_output(0)
        tensor.name = name
        return tensor

    def constant(self, name: str, weight: Weight | None = None, shape: Sequence[int] | None = None) -> Any:
        """An initializer by its name (or `weight` under that name), in another shape if wanted; once a name."""
        if name in self._constants:
            return self._constants[name]
        weight = weight or self.weights.get(name)
        data = np.ascontiguousarray(weight.data)
        self.used[name] = weight = Weight(weight.dtype, tuple(shape if shape is not None else weight.shape), data)
        values = self.trt.Weights(self.type(weight.dtype), data.ctypes.data, weight.count)
        layer = self.network.add_constant(weight.shape, values)
        self._constants[name] = tensor = self.output(layer, name)
        if not self.network.set_weights_name(values, name):
            raise CompressError(
                f"TensorRT refused the name {name} for a constant; two constants may have the same bytes"
            )
        return tensor

    def computed(self, name: str, values: torch.Tensor, dtype: str | None = None) -> Any:
        """A constant that is made here, stored as `dtype` (None: the network's)."""
        if name in self._constants:
            return self._constants[name]
        kind = dtype or self.dtype
        flat = values.to(TORCH[kind]).contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().copy()
        return self.constant(name, Weight(kind, tuple(values.shape), data))

    # ---------------------------------------------------------------- arithmetic
    def cast(self, x: Any, dtype: str, name: str) -> Any:
        return self.output(self.network.add_cast(x, self.type(dtype)), name)

    def elementwise(self, a: Any, b: Any, operation: str, name: str) -> Any:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.output(self.network.add_elementwise(a, b, kind), name)

    def unary(self, x: Any, operation: str, name: str) -> Any:
        return self.output(self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)), name)

    def reshape(
        self,
        x: Any,
        shape: Sequence[int],
        name: str,
        first: Sequence[int] | None = None,
        second: Sequence[int] | None = None,
    ) -> Any:
        """Transpose, reshape, transpose; 0 keeps a dimension, -1 is what remains."""
        layer = self.network.add_shuffle(x)
        if layer is not None:
            if first is not None:
                layer.first_transpose = self.trt.Permutation(list(first))
            layer.reshape_dims = tuple(shape)
            if second is not None:
                layer.second_transpose = self.trt.Permutation(list(second))
        return self.output(layer, name)

    # ---------------------------------------------------------------- parts of a decoder
    def norm(self, x: Any, module: str, eps: float, rank: int = 3) -> Any:
        """Root mean square norm over the last dimension, computed in float32 and multiplied by the weight afterwards, as
        transformers does."""
        wide = x if self.dtype == "FLOAT" else self.cast(x, "FLOAT", f"{module}/wide")
        square = self.elementwise(wide, wide, "PROD", f"{module}/square")
        average = self.trt.ReduceOperation.AVG
        mean = self.output(self.network.add_reduce(square, average, 1 << (rank - 1), True), f"{module}/mean")
        little = self.computed(f"computed.eps.{rank}", torch.full((1,) * rank, eps), "FLOAT")
        root = self.unary(self.elementwise(mean, little, "SUM", f"{module}/sum"), "SQRT", f"{module}/root")
        scaled = self.elementwise(wide, self.unary(root, "RECIP", f"{module}/reciprocal"), "PROD", f"{module}/scaled")
        narrow = scaled if self.dtype == "FLOAT" else self.cast(scaled, self.dtype, f"{module}/narrow")
        name = f"{module}.weight"
        width = self.weights.shape(name)[-1]
        return self.elementwise(narrow, self.constant(name, shape=(*(1,) * (rank - 1), width)), "PROD", module)

    def linear(self, x: Any, module: str) -> Any:
        """`[batch, sequence, in] -> [batch, sequence, out]`: codes through a dequantize layer, or a dense matrix; bias if there is one."""
        none = self.trt.MatrixOperation.NONE
        if f"{module}.weight_codes" in self.weights:
            x = self._rounded(x, module)
        layer = self.network.add_matrix_multiply(x, none, self._matrix(module), none)
        y = self.output(layer, f"{module}/MatMul")
        name = f"{module}.bias"
        if name in self.weights:
            width = self.weights.shape(name)[-1]
            y = self.elementwise(y, self.constant(name, shape=(1, 1, width)), "SUM", f"{module}/Add")
        return y

    def _matrix(self, module: str) -> Any:
        """The weight `[1, in, out]`."""
        codes = f"{module}.weight_codes"
        if codes not in self.weights:
            name = f"{module}.weight"
            return self.constant(name, shape=(1, *self.weights.shape(name)))
        scale = f"{module}.weight_scale"
        layer = self.network.add_dequantize(self.constant(codes), self.constant(scale), self.type(self.dtype))
        ranks = len(self.weights.shape(scale))
        if layer is not None and ranks:
            layer.axis = 1 if ranks == 1 else 0  # one scale a column, or blocks of rows
        dense = self.output(layer, f"{module}/DequantizeLinear")
        return self.reshape(dense, (1, *self.weights.shape(codes)), f"{module}/matrix")

    def _rounded(self, x: Any, module: str) -> Any:
        """The input through the grid of its static scale, where it has one."""
        name = f"{module}.input_scale"
        if name not in self.weights:
            return x
        scale = self.constant(name)
        kind = self.type(self.weights.get(f"{module}.weight_codes").dtype)
        codes = self.output(self.network.add_quantize(x, scale, kind), f"{module}/QuantizeLinear")
        return self.output(
            self.network.add_dequantize(codes, scale, self.type(self.dtype)), f"{module}/input/DequantizeLinear"
        )
