"""Base class of the dispatch table's Triton kernels. Importing this file does not import triton."""

from __future__ import annotations

import sys
from abc import abstractmethod
from functools import cache, partial
from importlib.util import find_spec
from itertools import product

import torch

from runtime.formats.checks import SCALE_DTYPES, Tensors
from runtime.kernels.base import Kernel, Layer
from runtime.kernels.reference import Reference
from runtime.kernels.triton import gpu

REFERENCE = Reference()
#: Rows of activations that between them make every launch of a kernel: both sides of each limit where another one, or another
#: launch configuration, takes over. None but 1 is a multiple of 16, so that what is compiled for them assumes nothing.
ROWS = (1, 2, 3, 17, 33, 65, 257, 513, 1025)


class TritonKernel(Kernel):
    """What all have in common: where they run, and why they cannot.

    `device` is "cuda"; "cpu" is for tests, which run the kernels in triton's interpreter.
    """

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def why_not(self, layer: Layer) -> str | None:
        if not installed() and not _compiled_ahead(layer.device):
            return "triton is not installed"
        if layer.dtype not in (torch.float16, torch.bfloat16):
            return f"it computes with float16 and bfloat16 activations, not {str(layer.dtype).removeprefix('torch.')}"
        if gpu.capability(layer.device) < self.capability(layer):
            major, minor = self.capability(layer)
            return f"it needs a GPU of compute capability {major}.{minor} or later"
        reason = self.why_not_scheme(layer)
        return reason if reason is not None or installed() else self._why_not_ahead(layer)

    def _why_not_ahead(self, layer: Layer) -> str | None:
        from runtime.kernels.triton import aot

        def every_launch(scale: torch.dtype, biased: bool) -> None:
            tensors = self.blank(layer, scale)
            bias = torch.empty(layer.shape[0], dtype=layer.dtype, device="meta") if biased else None
            major, minor = gpu.capability(layer.device)
            with gpu.assuming(10 * major + minor):
                for rows in ROWS:
                    x = torch.empty(rows, layer.shape[1], dtype=layer.dtype, device="meta")
                    self.compute(x, tensors, layer, bias)

        reasons = []
        # `Layer` does not say what scales are stored in, nor whether there is a bias.
        for kind in product(dict.fromkeys((layer.dtype, *SCALE_DTYPES)), (False, True)):
            missing = aot.missing(partial(every_launch, *kind), layer.device, remember=(self.name, layer, kind))
            if missing is None:
                return None
            reasons.append(missing)
        return f"triton is not installed, and no kernel compiled ahead is right for {reasons[0]}"

    @abstractmethod
    def why_not_scheme(self, layer: Layer) -> str | None:
        """The reason in the layer's scheme, if there is one."""

    def capability(self, layer: Layer) -> tuple[int, int]:
        """Least compute capability."""
        return 8, 0

    @abstractmethod
    def blank(self, layer: Layer, scale: torch.dtype | None = None) -> Tensors:
        """On meta, tensors like those that `prepare` makes and `compute` reads; `scale`: dtype of stored scales (None: the layer's)."""

    @abstractmethod
    def compute(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        """`run`, where there is a kernel for every launch; MissingKernelError else."""

    def run(self, x: torch.Tensor, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> torch.Tensor:
        from runtime.kernels.triton.jit import MissingKernelError

        try:
            return self.compute(x, tensors, layer, bias)
        except MissingKernelError:  # no triton, and the log has told: rows or strides that no kernel was compiled for
            return REFERENCE.multiply(x, self.restore(tensors, layer), tensors, layer, bias)


@cache
def installed() -> bool:
    """Whether triton can be imported."""
    return find_spec("triton") is not None


def _compiled_ahead(device: torch.device) -> bool:
    """Whether kernels that need no triton were loaded for the device."""
    aot = sys.modules.get("runtime.kernels.triton.aot")  # loaded by whoever offers some
    return aot is not None and bool(aot.offers(device))
