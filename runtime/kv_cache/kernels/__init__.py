"""Attention over regions of a compressed cache: for each device the kernels that read pages as they are stored.

A kernel is a module with a `NAME`, `why_not(query, region) -> str | None`, a reason in words why it cannot take them, and
`run(query, region, scale, softcap, visible, chosen)`, which has the contract of `region_attention`. Modules are imported when a
query on their device comes first.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Protocol, cast

import torch

from runtime.kv_cache.region import Chosen, Region, region_attention

#: By type of device, tried in this order; where none takes it, plain torch does.
KERNELS: dict[str, tuple[str, ...]] = {
    "cpu": ("runtime.kv_cache.kernels.cpu",),
    "cuda": ("runtime.kv_cache.kernels.triton_attention",),
}
#: What plain torch is called where kernels have names.
REFERENCE = "kv-reference"
_log = logging.getLogger("compress.kernels")


class Kernel(Protocol):
    """What a module of this table has.

    Attributes:
        NAME: as `explain` shows it.
    """

    NAME: str

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
    """`region_attention` by the first kernel of the query's device that can; where none can, the log says once why.

    Kernels compute with states as they are stored; the reference rounds decoded ones to the model's dtype first.
    """
    kernel, reason = _find(query, region)
    if kernel is not None:
        return kernel.run(query, region, scale, softcap, visible, chosen)
    _say(query.device.type, reason)
    return region_attention(query, region, scale, softcap, visible, chosen)


def explain(query: torch.Tensor, region: Region) -> str:
    """What `attend_region` computes with: a kernel's name, or "kv-reference" and why no kernel does."""
    kernel, reason = _find(query, region)
    return f"{REFERENCE}: {reason}" if kernel is None else kernel.NAME


def _find(query: torch.Tensor, region: Region) -> tuple[Kernel | None, str]:
    """The first kernel that can; None, and why none can."""
    reasons = []
    for kernel in _kernels(query.device.type):
        reason = kernel.why_not(query, region)
        if reason is None:
            return kernel, ""
        reasons.append(reason)
    return None, "; ".join(reasons) or "there is no kernel for it"


@cache  # of what is said at every step, the first time is enough
def _say(device: str, reason: str) -> None:
    _log.warning("plain torch computes attention over a compressed cache on %s, slower: %s", device, reason)


@cache
def _kernels(device: str) -> tuple[Kernel, ...]:
    found = []
    for name in KERNELS.get(device, ()):
        try:
            found.append(cast(Kernel, importlib.import_module(name)))
        except ModuleNotFoundError:  # it, or what it is written in (triton), is not installed
            continue
    return tuple(found)
