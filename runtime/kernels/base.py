"""Interface of a kernel: the layers it can compute, the layout of their weights, and the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from runtime import formats
from runtime.formats.grid import GridScheme
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.representation import Tensors
from runtime.formats.scheme import ActivationScheme, CompressedWeight

ShapeClass = Literal["decode", "batch", "prefill"]
#: Row counts that may have a kernel each: one row, a few, many.
CLASSES: tuple[ShapeClass, ...] = ("decode", "batch", "prefill")
BATCH_ROWS = 64  # most rows of the class "batch"
_EXACT = 1 << 15  # columns up to which a sum of int8 products, zero points included, stays inside int32


def shape_class(rows: int) -> ShapeClass:
    """The class of a product with so many rows of activations."""
    return "decode" if rows <= 1 else "batch" if rows <= BATCH_ROWS else "prefill"


@dataclass(frozen=True)
class Layer:
    """A linear layer as a kernel sees it: what is stored, `shape = (out, in)`, dtype of the activations, device."""

    entry: ModuleEntry
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def grid(self) -> GridScheme:
        """Grid of the weights, block floats too, for kernels that read nothing else."""
        assert isinstance(self.entry.scheme.weights, GridScheme)
        return self.entry.scheme.weights

    @property
    def activations(self) -> ActivationScheme:
        """Grid of the activations, for kernels of layers that quantize them."""
        assert self.entry.scheme.activations is not None
        return self.entry.scheme.activations

    @property
    def group(self) -> int:
        """Columns that share a scale; 0: all of a row do."""
        weights = self.entry.scheme.weights
        return 0 if weights is None else weights.group_size or 0

    @property
    def storage(self) -> formats.Format:
        """How the weight is stored."""
        return formats.get(self.entry.format)

    def unpack(self, tensors: Tensors, check: bool = True) -> CompressedWeight:
        """The weight out of stored tensors; ArtifactError where they are not right (`check`)."""
        return self.storage.unpack(tensors, self.entry.scheme, self.shape, self.dtype, check=check)

    def why_not_weight_only(self, fewest: int, most: int, multiple: int = 1) -> str | None:
        """The reason it is no layer of such integer weights and unquantized activations; arguments as of `why_not_integers`."""
        return self.why_not_integers(fewest, most, multiple) or self.why_not_as_given()

    def why_not_integers(self, fewest: int, most: int, multiple: int = 1) -> str | None:
        """The reason it is no layer of integer weights; None when it is.

        Args:
            fewest, most: bits of a weight.
            multiple: what the size of groups must be a multiple of.
        """
        weights = self.entry.scheme.grid
        if weights is None or weights.type != "int" or not fewest <= weights.bits <= most:
            return f"it computes integer weights of {fewest} to {most} bits"
        if weights.strategy == "group" and (weights.group_size or 1) % multiple:
            return f"it wants groups of a multiple of {multiple}, not {weights.group_size}"
        return None

    def why_not_as_given(self) -> str | None:
        """The reason its activations are not multiplied as they are given; None when they are."""
        return None if self.entry.scheme.activations is None else "it computes with unquantized activations"

    def why_not_sum_of_codes(self) -> str | None:
        """The reason its product is no scaled sum of 8-bit codes, integers or float8, of weights times activations; None when it is."""
        weights, activations = self.entry.scheme.grid, self.entry.scheme.activations
        if weights is None or activations is None or weights.type != activations.type or activations.bits > 8:
            return "it computes integer weights with integer activations, or float8 with float8"
        if weights.strategy == "group" or activations.group_size is not None:
            return "a sum of codes cannot run across groups of different scale"
        if weights.type == "float" and not activations.symmetric:
            return "it computes with symmetric float8 activations"
        if activations.outliers is not None:
            return "outliers of its inputs are not rounded, and this kernel multiplies codes only"
        if weights.type == "int" and self.shape[1] >= _EXACT:
            return f"rows of {_EXACT} weights or more could overflow an int32 sum"
        return None


class Kernel(ABC):
    """One way to compute `x W^T` from stored tensors.

    Attributes:
        name: how `load(kernels=...)` selects it and `explain()` shows it.
        formats: storage formats it can start from.
        device: device type it runs on, None for any.
        classes: row counts it is meant for. `run` is right for any; elsewhere something else is better.
        accuracy: "exact" computes with the activations as they are, to the rounding of their dtype; "fast" rounds them to
            fewer bits than the layer asks for, and is chosen only where that is allowed.
        layout: what `prepare` makes. Kernels of equal layout have equal `prepare` and `restore`, so that a layer can have
            one kernel a shape class over one copy of its weight. By default a layout of the kernel's own.
    """

    name: str
    formats: frozenset[str]
    device: str | None
    classes: frozenset[ShapeClass] = frozenset(CLASSES)
    accuracy: Literal["exact", "fast"] = "exact"

    @property
    def layout(self) -> str:
        """Name of the weight layout that the kernel reads; its own by default."""
        return self.name

    @abstractmethod
    def why_not(self, layer: Layer) -> str | None:
        """The reason this kernel cannot compute the layer; None when it can, for any number of rows."""

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        """Lay the weight out as the kernel reads it; the stored tensors are dropped afterwards."""
        return tensors

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        """The exact weight back from what `prepare` made (for `dequantize`, saving, and moving to another device)."""
        return layer.unpack(tensors, check=False)

    def multiply_dense(
        self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`run` by torch's product with the dequantized weight, for row counts where nothing is faster."""
        return torch.nn.functional.linear(x, self.restore(tensors, layer).dequantize(), bias)

    def sample(self, layer: Layer) -> Tensors | None:
        """Made-up tensors as `prepare` would make them, to measure kernels with; None: there is nothing to choose by."""
        return None

    @abstractmethod
    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        """`[rows, in]` in `layer.dtype` -> `[rows, out]`. `tensors` is what `prepare` made."""

    def path(self, rows: int) -> str:
        """In a few words, what `run` does for this many rows."""
        return self.name

    def note(self, tensors: Tensors) -> str:
        """What follows in those words where `prepare` made something else of this weight than of others."""
        return ""


@dataclass(frozen=True)
class Choice:
    """What computes a layer: one kernel a shape class, all of one layout."""

    decode: Kernel
    batch: Kernel
    prefill: Kernel

    def kernel(self, rows: int) -> Kernel:
        """The kernel for so many rows of activations."""
        return getattr(self, shape_class(rows))

    def __str__(self) -> str:
        """`int4-c`, or `int4-c (decode, batch), dense-tiles (prefill)` where classes differ."""
        served: dict[str, list[str]] = {}
        for name in CLASSES:
            served.setdefault(getattr(self, name).name, []).append(name)
        if len(served) == 1:
            return self.decode.name
        return ", ".join(f"{kernel} ({', '.join(classes)})" for kernel, classes in served.items())
