"""Dispatch of the operations between matrix products: Triton kernels on CUDA (and in Triton's interpreter), torch elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.engines.cuda import reference

_log = logging.getLogger("compress.engine")


@dataclass(frozen=True)
class Ops:
    """Functions with the arguments and results of those in `reference`, but for `swiglu`, which takes the parts of a joined product.

    Attributes:
        name: "triton", "triton, compiled ahead" or "torch".
    """

    name: str
    rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    rotate_and_store: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]


def _torch_swiglu(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
    return reference.swiglu(gate, up)


TORCH = Ops("torch", reference.rms_norm, _torch_swiglu, reference.rotate_and_store, reference.decode_attention)


def choose(device: torch.device) -> Ops:
    """The best for tensors on this device."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return TORCH
    try:
        from runtime.kernels.triton import aot, jit

        if jit.INSTALLED:
            return kernels()
    except ImportError as error:
        _log.warning("triton cannot be used, attention and norms run in torch: %s", error)
        return TORCH
    if aot.offers(device):
        return with_fallback(kernels())
    _log.warning("triton is not installed, attention and norms run in torch")
    return TORCH


def kernels() -> Ops:
    """Those of triton, compiled when they are first launched, or ahead."""
    from runtime.engines.cuda import paged_attention, rotary_store
    from runtime.kernels.triton import fused

    def swiglu(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return fused.swiglu(parts[0]) if len(parts) == 1 else reference.swiglu(*parts)

    return Ops("triton", fused.rms_norm, swiglu, rotary_store.rotate_and_store, paged_attention.decode_attention)


def with_fallback(ops: Ops) -> Ops:
    """Plain torch for every call that no kernel was compiled ahead for (the log says which), where there is no compiler."""

    def guarded(name: str) -> Callable[..., Any]:
        from runtime.kernels.triton.jit import MissingKernelError

        first, second = getattr(ops, name), getattr(TORCH, name)

        def call(*args: Any) -> Any:
            try:
                return first(*args)
            except MissingKernelError:
                return second(*args)

        return call

    names = ("rms_norm", "swiglu", "rotate_and_store", "decode_attention")
    return Ops(f"{ops.name}, compiled ahead", *(guarded(name) for name in names))
