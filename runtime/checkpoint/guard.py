"""Guard tensors: they keep readers that do not know our formats from initializing layers at random.

transformers ignores an unknown quantization method with a warning, and initializes missing weights at random. So an artifact has an
empty `X.weight` for each compressed layer `X`, which fails with a size mismatch in any model class. Our own readers ignore guards
(`runtime.checkpoint.checkpoint`, `runtime.layers.hf`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

GUARDS = "model-guards.safetensors"
"""File of the guards. transformers reads files in the order of their names and the last one wins, so that a guard also hides codes
that are stored under the name `weight`."""

NOTICE = "import runtime before transformers loads this checkpoint"
"""Name of one more empty tensor, which transformers lists in its report of mismatched tensors."""


def is_guard(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor is a guard: bool of shape `[0]`, which no weight is."""
    return tuple(shape) == (0,) and dtype == torch.bool


def guards(names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Guards with these names, and the notice; {} if there are no names."""
    found = sorted(names)
    return {name: torch.empty(0, dtype=torch.bool) for name in ([*found, NOTICE] if found else [])}
