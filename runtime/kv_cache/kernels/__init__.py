"""Attention over regions of a compressed cache: for each type of device the kernel that reads pages as they are stored.

A kernel is a module with a `NAME`, `why_not(query, region) -> str | None`, a reason in words why it cannot take them, and
`run(queries, region, visible, chosen)`, which has the contract of `region_attention`. It is imported with the first
query on its device.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch

from runtime.kv_cache.region import Chosen, Queries, Region, region_attention

#: By type of device; where there is none, or it cannot, plain torch computes.
KERNELS: dict[str, str] = {"cpu": "runtime.kv_cache.kernels.cpu", "cuda": "runtime.kv_cache.kernels.triton_attention"}
#: What plain torch is called where kernels have names.
REFERENCE = "kv-reference"
_log = logging.getLogger("compress.kernels")


def attend_region(
    queries: Queries, region: Region, visible: torch.Tensor | None = None, chosen: Chosen | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`region_attention` by the kernel of the query's device if it can; where it cannot, the log says once why.

    Kernels compute with states as they are stored; the reference rounds decoded ones to the model's dtype first.
    """
    kernel, reason = _find(queries.states, region)
    if reason is None:
        return kernel.run(queries, region, visible, chosen)
    warn_once(queries.states.device.type, reason)
    return region_attention(queries, region, visible, chosen)


def explain(query: torch.Tensor, region: Region) -> str:
    """What `attend_region` computes with: a kernel's name, or "kv-reference" and why no kernel does."""
    kernel, reason = _find(query, region)
    return str(kernel.NAME) if reason is None else f"{REFERENCE}: {reason}"


def _find(query: torch.Tensor, region: Region) -> tuple[Any, str | None]:
    """The kernel of the query's device, and why it cannot compute this."""
    name = KERNELS.get(query.device.type)
    if name is None:
        return None, "there is no kernel for it"
    kernel = importlib.import_module(name)
    return kernel, kernel.why_not(query, region)


@cache  # of what is said at every step, the first time is enough
def warn_once(device: str, reason: str) -> None:
    """Log why plain torch computes attention."""
    _log.warning("plain torch computes attention over a compressed cache on %s, slower: %s", device, reason)
