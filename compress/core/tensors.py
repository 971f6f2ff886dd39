"""Products of float32 matrices by all of AVX-512; and what tensors hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from runtime.system import processes

#: Kernels that oneDNN caches; a block without experts needs fewer.
KERNELS_KEPT = 32


@contextmanager
def wide_products() -> Iterator[None]:
    """While active, float32 products use all of AVX-512 on AMD's CPUs, where MKL, torch's first choice, is content with AVX2.

    oneDNN has the kernels. torch gives it float32 products only where it may compute in bfloat16, which it does not without AMX.
    """
    if not _onednn_is_wider():
        yield
        return
    with _through_onednn():
        yield


@contextmanager
def _through_onednn() -> Iterator[None]:
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@cache
def _onednn_is_wider() -> bool:
    """Whether `wide_products` brings speed, and, as a product says, costs no precision."""
    flags, vendor = processes.flags(), next(iter(processes.facts("vendor_id")), "")
    if "AMD" not in vendor or "avx512f" not in flags or "amx_bf16" in flags:
        return False
    one, other = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    with _through_onednn():
        found = one @ other
    return relative(found, one.double() @ other.double()) < 1e-5


def bound_kernel_caches() -> None:
    """Limit the kernels that oneDNN caches for products of each shape; variables that the user has set are left alone.

    Each expert reads another number of tokens, so almost every product has a shape of its own, and by default a thousand kernels of half a
    megabyte each are cached. The variables are read at the first product, so this does nothing in a process that has computed one.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS_KEPT))


def finite(value: torch.Tensor) -> bool:
    """Whether no element of a tensor is NaN or Inf. Both survive in the extremes, which one pass finds without a mask."""
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.numel() == 0 or not value.is_floating_point():
        return True
    low, high = torch.aminmax(value)
    return bool(torch.isfinite(low) & torch.isfinite(high))


# How far two tensors are apart.


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference as a share of the reference's norm; infinite where one is finite and the other is not.

    Numbers that are finite in neither are ignored: with a recipe that skips layers with NaN, the artifact computes NaN where its source
    does.
    """
    value, reference = value.detach().float().cpu(), reference.detach().float().cpu()
    finite = torch.isfinite(reference)
    if not torch.equal(finite, torch.isfinite(value)):
        return float("inf")
    value, reference = value[finite], reference[finite]
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))
