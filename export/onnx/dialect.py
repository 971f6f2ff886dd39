"""The three dialects of ONNX that are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from export.onnx.grid import ONNX, TENSORRT, Rules


@dataclass(frozen=True)
class Dialect:
    """How a graph is spoken.

    Attributes:
        name: `onnx`: standard operators that ONNX Runtime fuses; `ort`: ONNX Runtime's own operators; `tensorrt`: what TensorRT's
            parser takes.
        opset: of the default domain.
        dtype: activations and logits.
        rules: of weights.
        accuracy_level: of MatMulNBits (`ort` only): 0 float32 sums, 4 activations rounded to int8.
    """

    name: Literal["onnx", "ort", "tensorrt"]
    opset: int
    dtype: torch.dtype
    rules: Rules
    accuracy_level: int = 0

    @property
    def own_operators(self) -> bool:
        """Operators of `com.microsoft` are used."""
        return self.name == "ort"


def dialect(name: Literal["onnx", "ort", "tensorrt"], dtype: torch.dtype) -> Dialect:
    """The dialect of that name with activations in `dtype`."""
    if name == "tensorrt":
        return Dialect(name, 23, dtype, TENSORRT)
    return Dialect(name, 21, dtype, ONNX)
