"""What recovery makes small: the distance from a teacher's hidden states, and from what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def squarehead(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], counted: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over layers of `|f_t - f_s|^2 / |f_t|^2`, each summed over the counted positions.

    Normalized by layer, as the states of late layers are many times as large as those of early ones.

    Args:
        ours, theirs: hidden states of layers, `[b, s, hidden]` each.
        counted: bool `[b, s]`; None: all.

    Source: Kurtic et al., Sparse Finetuning for Inference Acceleration of Large Language Models, arXiv 2310.06927 (SquareHead).
    """
    parts = []
    for own, other in zip(ours, theirs, strict=True):
        target = other.detach().float()
        error, size = (own.float() - target).square(), target.square()
        if counted is not None:
            error, size = error[counted], size[counted]
        parts.append(error.sum() / size.sum().clamp_min(torch.finfo(torch.float32).tiny))
    return torch.stack(parts).mean()
