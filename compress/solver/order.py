"""In which order the column loop visits the columns."""

from __future__ import annotations

import torch


def column_order(diagonal: torch.Tensor, units: list[int]) -> torch.Tensor:
    """Columns by falling energy, with consecutive columns kept together in nested units.

    Args:
        diagonal: `[in]` diagonal of the Hessian.
        units: sizes of the units, outermost first, each dividing the one before (1 = single columns move freely). Units are
            ordered by the mean energy of their columns, then the columns inside a unit by the next size. A ragged last unit
            is one of them. The innermost size keeps its columns in their original order.

    Returns:
        Permutation `[in]`.
    """
    order = torch.arange(diagonal.shape[0], device=diagonal.device)
    ranks = []
    for size in units:
        index = order // size
        count = int(index[-1]) + 1
        total = torch.zeros(count, dtype=diagonal.dtype, device=diagonal.device).index_add_(0, index, diagonal)
        energy = total / torch.bincount(index, minlength=count)
        rank = torch.empty(count, dtype=torch.long, device=diagonal.device)
        rank[energy.argsort(descending=True, stable=True)] = torch.arange(count, device=diagonal.device)
        ranks.append(rank[index])
    # From the inside out: a stable sort of the outer units keeps the inner order.
    key = order
    for rank in reversed(ranks):
        key = key[rank[key].argsort(stable=True)]
    return key
