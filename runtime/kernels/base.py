"""What a kernel is: which layers it can compute, how it wants their weights laid out, and the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from runtime import formats
from runtime.formats.checks import Tensors
from runtime.quantization_config import ModuleEntry
from runtime.scheme import CompressedWeight


@dataclass(frozen=True)
class Layer:
    """A linear layer as a kernel sees it: what is stored, `shape = (out, in)`, dtype of the activations, device."""

    entry: ModuleEntry
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class Kernel(ABC):
    """One way to compute `x W^T` from stored tensors.

    Attributes:
        name: how `load(kernels=...)` selects it and `explain()` shows it.
        operation: row of the table; every kernel here is a `linear`.
        formats: storage formats it can start from.
        device: device type it runs on, None for any.
    """

    name: str
    operation: str = "linear"
    formats: frozenset[str]
    device: str | None

    @abstractmethod
    def why_not(self, layer: Layer) -> str | None:
        """The reason this kernel cannot compute the layer; None when it can, for any number of rows."""

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        """Lay the weight out as the kernel reads it; the stored tensors are dropped afterwards."""
        return tensors

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        """The exact weight back from what `prepare` made (for `dequantize`, saving, and moving to another device)."""
        return formats.get(layer.entry.format).unpack(
            tensors, layer.entry.scheme, layer.shape, layer.dtype, check=False
        )

    @abstractmethod
    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        """`[rows, in]` in `layer.dtype` -> `[rows, out]`. `tensors` is what `prepare` made."""

    def path(self, rows: int) -> str:
        """In a few words, what `run` does for this many rows."""
        return self.name
