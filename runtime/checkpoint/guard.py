"""Guard tensors: what keeps readers that do not know our formats from filling layers with random weights.

transformers skips a quantization that it does not know with a warning, and initializes every weight that it then misses. So an
artifact has for each of its compressed layers `X` an empty `X.weight`: every plain reader, of whatever class, refuses its size. Our own
readers pass over guards (`runtime.checkpoint.checkpoint`, `runtime.layers.hf`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

GUARDS = "model-guards.safetensors"
"""The file of an artifact that has nothing but guards. transformers reads files by name and lets a later one win, so that a guard also
covers codes that are called `weight` themselves."""

NOTICE = "import runtime before transformers loads this checkpoint"
"""Name of one more empty tensor: transformers lists it in the report that comes with the refusal."""


def is_guard(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor is one: empty, of one dimension, bool, which no weight is."""
    return tuple(shape) == (0,) and dtype == torch.bool


def guards(names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Guards of these names, and the notice; empty where there are no names."""
    found = sorted(names)
    return {name: torch.empty(0, dtype=torch.bool) for name in ([*found, NOTICE] if found else [])}
