"""What recovery makes small: the distance from a teacher's hidden states, and from what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def squarehead(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean over layers and rows of `|f_t - f_s|^2 / |f_t|^2`, both summed over a row's positions.

    Normalized by layer, as the states of late layers are many times as large as those of early ones; and by row, so that it does not
    matter which rows are computed together, or by whom.

    Args:
        ours, theirs: hidden states of layers, `[b, s, hidden]` each.

    Source: Kurtic et al., Sparse Finetuning for Inference Acceleration of Large Language Models, arXiv 2310.06927 (SquareHead, whose
    sums are over a batch).
    """
    parts = []
    for own, other in zip(ours, theirs, strict=True):
        target = other.detach().float()
        error, size = ((value.square()).sum((1, 2)) for value in (own.float() - target, target))
        parts.append((error / size.clamp_min(torch.finfo(torch.float32).tiny)).mean())
    return torch.stack(parts).mean()
