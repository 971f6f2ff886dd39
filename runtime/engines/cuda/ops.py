"""Which code runs between the matrix products: Triton kernels on CUDA devices (and in triton's interpreter), plain torch elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from runtime.engines.cuda import plain

_log = logging.getLogger("compress.engine")


@dataclass(frozen=True)
class Ops:
    """Functions with the arguments and results of those in `plain`, but for `swiglu`, which takes the pieces of a joined product.

    Attributes:
        name: "triton" or "torch".
    """

    name: str
    rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    swiglu: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    rotate_and_store: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]


def _plain_swiglu(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    gate, up = pieces if len(pieces) == 2 else pieces[0].chunk(2, dim=-1)
    return plain.swiglu(gate, up)


TORCH = Ops("torch", plain.rms_norm, _plain_swiglu, plain.rotate_and_store, plain.decode_attention)


def choose(device: torch.device) -> Ops:
    """The best for tensors on this device."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return TORCH
    try:
        from runtime.engines.cuda import paged_attention, rotary_store
        from runtime.kernels.triton import fused
    except ImportError as error:
        _log.warning("triton cannot be used, attention and norms run in plain torch: %s", error)
        return TORCH

    def swiglu(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return fused.swiglu(pieces[0]) if len(pieces) == 1 else plain.swiglu(*pieces)

    return Ops("triton", fused.rms_norm, swiglu, rotary_store.rotate_and_store, paged_attention.decode_attention)
