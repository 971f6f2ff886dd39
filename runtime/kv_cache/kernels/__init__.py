"""Attention over regions of a compressed cache: for each device the kernels that read pages as they are stored.

A kernel is a module with `why_not(query, region) -> str | None`, a reason in words why it cannot take them, and
`run(query, region, scale, softcap, visible, chosen)`, which has the contract of `region_attention`. Modules are imported when a
query on their device comes first.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, cast

import torch

from runtime.kv_cache.region import Chosen, Region, region_attention

#: By type of device, tried in this order; where none takes it, plain torch does.
KERNELS: dict[str, tuple[str, ...]] = {
    "cpu": ("runtime.kv_cache.kernels.cpu",),
    "cuda": ("runtime.kv_cache.kernels.triton_attention",),
}


class Kernel(Protocol):
    """What a module of this table has."""

    def why_not(self, query: torch.Tensor, region: Region) -> str | None:
        """Why it cannot run, or None."""

    def run(
        self,
        query: torch.Tensor,
        region: Region,
        scale: float,
        softcap: float,
        visible: torch.Tensor | None,
        chosen: Chosen | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `region_attention`."""


def attend_region(
    query: torch.Tensor,
    region: Region,
    scale: float,
    softcap: float = 0.0,
    visible: torch.Tensor | None = None,
    chosen: Chosen | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`region_attention` by the first kernel of the query's device that can.

    Kernels compute with states as they are stored; the reference rounds decoded ones to the model's dtype first.
    """
    for kernel in _kernels(query.device.type):
        if kernel.why_not(query, region) is None:
            return kernel.run(query, region, scale, softcap, visible, chosen)
    return region_attention(query, region, scale, softcap, visible, chosen)


@cache
def _kernels(device: str) -> tuple[Kernel, ...]:
    found = []
    for name in KERNELS.get(device, ()):
        try:
            found.append(cast(Kernel, importlib.import_module(name)))
        except ModuleNotFoundError:  # it, or what it is written in (triton), is not installed
            continue
    return tuple(found)
