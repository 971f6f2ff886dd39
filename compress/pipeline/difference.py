"""How far two tensors are apart."""

from __future__ import annotations

import torch


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference as a share of the reference's norm; infinite where one is finite and the other is not.

    Numbers that are finite in neither are passed over: a recipe that skips layers with NaN has an artifact that computes NaN where its
    source does.
    """
    value, reference = value.detach().float().cpu(), reference.detach().float().cpu()
    finite = torch.isfinite(reference)
    if not torch.equal(finite, torch.isfinite(value)):
        return float("inf")
    value, reference = value[finite], reference[finite]
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))
