"""Block-sparse panels: groups of 32 rows whose weights are all zero are neither stored nor multiplied.

Two tensors beside `weight` say which groups it has: `runs` int64 `[runs, 3]`, of groups next to each other in a panel the first, the
last + 1, and how many are stored before them; `first_run` int64 `[panels + 1]`, where the runs of a panel begin.
"""

from __future__ import annotations

import ctypes

import torch

from runtime.formats.representation import Tensors
from runtime.kernels.cpu.library import Linear


def runs_of(kept: torch.Tensor) -> Tensors:
    """`runs` and `first_run` for bool `[panels, groups]`, True = stored."""
    edges = torch.nn.functional.pad(kept.to(torch.int8), (1, 1)).diff(dim=1)
    (panel, first), (_, last) = ((edges == step).nonzero(as_tuple=True) for step in (1, -1))
    size = last - first
    count = torch.bincount(panel, minlength=kept.shape[0])
    return {
        "runs": torch.stack((first, last, size.cumsum(0) - size), 1),
        "first_run": torch.nn.functional.pad(count.cumsum(0), (1, 0)),
    }


def kept_of(tensors: Tensors, groups: int) -> torch.Tensor:
    """Inverse of `runs_of`."""
    runs, first_run = tensors["runs"], tensors["first_run"]
    panels = first_run.shape[0] - 1
    start = torch.repeat_interleave(torch.arange(panels), first_run.diff()) * groups
    steps, one = torch.zeros(panels * groups + 1, dtype=torch.int64), torch.ones(runs.shape[0], dtype=torch.int64)
    steps.index_add_(0, start + runs[:, 0], one).index_add_(0, start + runs[:, 1], -one)
    return steps.cumsum(0)[:-1].view(panels, groups) > 0


def stored_groups(linear: Linear) -> int:
    """Groups of 32 rows that an integer weight has in memory."""
    panels = -(-linear.rows // 32)
    if not linear.runs:
        return panels * linear.groups
    runs = ctypes.c_int64.from_address(linear.first_run + 8 * panels).value
    first, last, before = (ctypes.c_int64 * 3).from_address(linear.runs + 24 * (runs - 1))
    return before + last - first
