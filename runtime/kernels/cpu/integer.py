"""Integer, 4-bit float and k-quant weights on a CPU through this folder's C library: activations become integers, sums are exact.

The activations of a group of columns share one scale; each becomes `digits` signed bytes (`runtime/kernels/cpu/c/digits.h`):

- exact: two digits in bfloat16 and float16 (an activation is off by at most 2^-15 of the largest of its group), three in float32
  (2^-23). Products with the weight's codes are added as integers, groups in float32, in one order: a row's result does not
  depend on the other rows, the number of threads or the CPU.
- fast: one digit, int8 activations (off by at most 1/254 of the largest of their group), half the work and less.

A group that holds an infinity or a NaN makes its rows NaN, also where the weights it meets are zeros that are left out.
"""

from __future__ import annotations

import ctypes
import math
from abc import abstractmethod

import torch

from runtime.formats.representation import Tensors
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.base import Kernel, Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.codebooks import CODEBOOKS
from runtime.kernels.cpu.library import bytes_at, tensor_of
from runtime.kernels.cpu.panels import FP4, K_QUANTS, PANEL, TRELLIS, W4, W8, Panels
from runtime.kernels.cpu.sparse24 import S24
from runtime.system import instruction_sets, processes

_WORTH_A_THREAD = 1 << 17  # multiplications; fewer are done before another thread has begun
_TILE = 1 << 18  # weights dequantized at once: a megabyte of float32, which the second cache holds


class CKernel(Kernel):
    """A kernel of this folder's C library: `x W^T + b` of any number of rows."""

    device = "cpu"

    @abstractmethod
    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        """What the C library is given: addresses of the tensors, which must outlive it. `bias` is float32 `[out]`."""

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        # Refused is what C would compute with without a word.
        if x.dtype != layer.dtype:
            raise RuntimeError(f"kernel {self.name} was prepared for {layer.dtype} and got {x.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"kernel {self.name} has no backward; use kernels='reference' to differentiate")
        y = torch.empty(x.shape[0], layer.shape[0], dtype=x.dtype)
        return self.compute(x.contiguous(), tensors, layer, bias, y) if y.numel() else y

    def compute(
        self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None, y: torch.Tensor
    ) -> torch.Tensor:
        """`x W^T + b` of at least one row and one output; `y` is filled and returned."""
        native, rows = library.load(), x.shape[0]
        assert native is not None
        offset = None if bias is None else bias.detach().float()
        linear = ctypes.byref(self.linear(tensors, layer, offset))
        kind, memory = library.TYPES[x.dtype], bytes_at(native.linear_memory(linear, rows))
        threads = threads_for(rows * layer.shape[0] * layer.shape[1])
        native.linear_run(linear, x.data_ptr(), kind, rows, y.data_ptr(), kind, memory, threads)
        return y


class PanelKernel(CKernel):
    """A kernel that reads weights in panels (`panels.py`)."""

    def __init__(self, panels: Panels) -> None:
        self.panels = panels
        self.formats = panels.formats

    @property
    def layout(self) -> str:
        """Name of the panel layout."""
        return self.panels.name

    def why_not(self, layer: Layer) -> str | None:
        reason = self.why_not_input(layer) or self.panels.why_not(layer)
        if reason is None and library.load() is None:
            return "it is written in C, and there is no compiler (or COMPRESS_NATIVE=0)"
        return reason

    def why_not_input(self, layer: Layer) -> str | None:
        """The reason it does not multiply the layer's activations; None when it does."""
        return layer.why_not_as_given()

    def prepare(self, tensors: Tensors, layer: Layer) -> Tensors:
        return self.panels.pack(tensors, layer)

    def restore(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        return self.panels.unpack(tensors, layer)

    def sample(self, layer: Layer) -> Tensors:
        return self.panels.sample(layer)

    def note(self, tensors: Tensors) -> str:
        return ", groups of zeros left out" if "runs" in tensors else ""

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        return self.panels.linear(tensors, layer, bias)


class IntegerKernel(PanelKernel):
    """Weights of integers, or of what counts as such, times activations in digits."""

    def __init__(self, name: str, panels: Panels, fast: bool = False) -> None:
        super().__init__(panels)
        self.name = name
        self.accuracy = "fast" if fast else "exact"

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        found = super().linear(tensors, layer, bias)
        found.digits = 1 if self.accuracy == "fast" else 3 if layer.dtype == torch.float32 else 2
        return found

    def path(self, rows: int) -> str:
        activations = "int8 activations" if self.accuracy == "fast" else "activations in two digits (float32: three)"
        return f"{activations}, C ({instruction_sets.chosen()})"


class RoundedKernel(PanelKernel):
    """Weights of integers, or 4-bit floats, times quantized activations.

    Codes of activations equal those of `activations.quantize_input` bit for bit, and are stored as digits: one or two for integers less
    their zero point, one for float4, three for float8 (in units of 2^-9). Sums in a group of columns are exact integers. A row does not
    depend on its neighbours, the threads or the CPU. Outliers, inputs that stay as they are (LLM.int8), are multiplied in float32.
    """

    def __init__(self, name: str, panels: Panels) -> None:
        super().__init__(panels)
        self.name = name

    def why_not_input(self, layer: Layer) -> str | None:
        if layer.entry.scheme.activations is None:
            return "it computes with quantized activations"
        if (layer.activations.group_size or 0) % self.panels.multiple:
            return f"it wants groups of a multiple of {self.panels.multiple}, not {layer.activations.group_size}"
        if layer.activations.outliers is not None and self.panels is S24:
            return "it does not handle outliers"
        return why_not_rounded(layer)

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        found, activations = super().linear(tensors, layer, bias), layer.activations
        found.digits = 3 if activations.type == "float" and not activations.e2m1 else 1 if activations.symmetric else 2
        found.rounding = rounding_of(tensors, layer)
        return found

    def path(self, rows: int) -> str:
        return f"quantized activations, C ({instruction_sets.chosen()})"


def why_not_rounded(layer: Layer) -> str | None:
    """The reason C does not round the layer's activations as its scheme says; None when it does."""
    activations = layer.activations
    if activations.strategy == "tensor" and activations.dynamic:
        return "one dynamic scale for all tokens makes a token's result depend on the others"
    if activations.type == "float" and not activations.symmetric:
        return "it computes with symmetric float8 activations"
    return None


def rounding_of(tensors: Tensors, layer: Layer) -> library.Rounding:
    """How C rounds the activations of a layer that quantizes them; zeros where it does not."""
    activations = layer.entry.scheme.activations
    if activations is None:
        return library.Rounding()
    if activations.type == "float":
        kind = "e2m1" if activations.e2m1 else "e4m3"
    else:
        kind = "integer" if activations.symmetric else "asymmetric"
    found = library.Rounding(library.ROUNDINGS[kind], activations.bits, library.ROUNDED_SCALES[activations.scales])
    found.span = activations.group_size or layer.shape[1]
    found.tail, found.tail_bits = activations.int8_tail, 8
    found.threshold = math.inf if activations.outliers is None else activations.outliers
    for field, name in (("scale", "input_scale"), ("zero", "input_zero_point"), ("global_scale", "input_global_scale")):
        if name in tensors:
            setattr(found, field, float(tensors[name]))
    return found


class DenseTiles(PanelKernel):
    """`x W^T + b` for many rows: tiles of the weight are dequantized on the fly and multiplied by the library's dense product.

    Unlike the integer kernels this does not promise that a row's result is independent of the rows beside it: BLAS and oneDNN choose
    blocks, and so the order of additions, by the shape of the product.
    """

    name = "dense-tiles"
    classes = frozenset({"prefill"})

    def compute(
        self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None, y: torch.Tensor
    ) -> torch.Tensor:
        native, (out, columns) = library.load(), layer.shape
        assert native is not None
        # Without arithmetic of that dtype in float32: the same up to the order of the sums, and several times faster.
        dtype = x.dtype if processes.multiplies(x.dtype) else torch.float32
        wide, y = x.to(dtype), y.to(dtype)
        panels = -(-out // PANEL)
        step = max(4, _TILE // (PANEL * max(1, columns)))
        linear = ctypes.byref(self.linear(tensors, layer, None))
        scratch = tensor_of(step * PANEL * columns * dtype.itemsize)
        threads = threads_for(step * PANEL * columns)
        for first in range(0, panels, step):
            last = min(panels, first + step)
            part = slice(first * PANEL, min(out, last * PANEL))
            width = part.stop - part.start
            native.linear_dequantize(linear, first, last, scratch.data_ptr(), library.TYPES[dtype], threads)
            tile = scratch[: columns * width * dtype.itemsize].view(dtype).view(columns, width)
            torch.mm(wide, tile, out=y[:, part])
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    def path(self, rows: int) -> str:
        return f"dequantize tiles in C ({instruction_sets.chosen()}) + dense matmul"


def threads_for(multiplications: int) -> int:
    """As many of torch's threads as have something to do. The result is the same with any number."""
    return max(1, min(torch.get_num_threads(), multiplications // _WORTH_A_THREAD))


def ordered(instruction_set: str) -> tuple[IntegerKernel, ...]:
    """The kernels in order of preference, which 2:4 weights make a question of the instruction set.

    2:4 panels take 3.25 bits a weight (groups of 128), W4 panels 5.125, of which one is the places that make the stored tensors come
    back; but from 2:4 panels every lane must pick its activations. With AVX2 (measured: one row, 11008 x 4096, one thread) exact
    products take 1.4 to 1.6 times as long from 2:4 panels, so W4 comes first; fast ones take 1.0 to 1.3 times as long, and their
    size decides. With AVX-512 it is unmeasured: 2:4 panels come first. `kernels="sparse24-c"` has them anywhere.
    """
    sparse, dense = IntegerKernel("sparse24-c", S24), IntegerKernel("int4-c", W4)
    return (
        *((dense, sparse) if instruction_set == "avx2" else (sparse, dense)),
        IntegerKernel("int8-c", W8),
        IntegerKernel("sparse24-c-fast", S24, fast=True),
        IntegerKernel("int4-c-fast", W4, fast=True),
        IntegerKernel("int8-c-fast", W8, fast=True),
    )


KERNELS: tuple[PanelKernel, ...] = (
    *ordered(instruction_sets.preferred()),
    RoundedKernel("sparse24-c-rounded", S24),  # few digits: see `ordered`
    RoundedKernel("int4-c-rounded", W4),
    RoundedKernel("int8-c-rounded", W8),
    RoundedKernel("fp4-c-rounded", FP4),
    IntegerKernel("fp4-c", FP4),
    IntegerKernel("fp4-c-fast", FP4, fast=True),
    IntegerKernel("k-quant-c", K_QUANTS),
    IntegerKernel("k-quant-c-fast", K_QUANTS, fast=True),
    IntegerKernel("trellis-c", TRELLIS),
    IntegerKernel("trellis-c-fast", TRELLIS, fast=True),
    IntegerKernel("row-codebook-c", CODEBOOKS),
    IntegerKernel("row-codebook-c-fast", CODEBOOKS, fast=True),
    *(DenseTiles(panels) for panels in (S24, W4, W8, FP4, K_QUANTS, TRELLIS, CODEBOOKS)),
)
