"""The layer that reads removed channels is fitted to what it gave before, from second moments of its inputs; nothing is trained."""

from __future__ import annotations

import torch

from runtime.errors import CompressError

_TRIES = 5


def damped(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """The moments with `damping` times their mean diagonal added to it."""
    mean = float(moments.diagonal().mean())
    return moments + torch.eye(len(moments), dtype=moments.dtype) * (damping * mean if mean > 0 else 1.0)


def refit(
    weight: torch.Tensor, moments: torch.Tensor, kept: torch.Tensor, damping: float
) -> tuple[torch.Tensor, float]:
    """The weight over kept inputs whose outputs come nearest to those of all inputs.

    Minimizes `E |W x - W' x_kept|^2 + lambda |W' - W_kept|^2`: the ridge holds to the weights that were there, so that inputs that were
    never seen keep theirs.

    Args:
        weight: `[out, in]`. moments: float32 `[in, in]`, mean of `x x^T`. kept: int64 `[k]`.
        damping: lambda as a share of the mean diagonal of the kept moments; ten times more where the system cannot be solved.

    Returns:
        float32 `[out, k]`, and the damping that it took.

    Raises:
        CompressError: the moments cannot be factored however they are damped.
    """
    wide, all_moments = weight.double(), moments.to("cpu", torch.float64)
    corner = all_moments[kept][:, kept]
    own = wide[:, kept]
    # Of the difference to the kept weights: (W' - W_k) (H_kk + lambda) = W_removed H_removed,k.
    target = wide @ all_moments[:, kept] - own @ corner
    for _ in range(_TRIES):
        factor, failed = torch.linalg.cholesky_ex(damped(corner, damping))
        if not int(failed):
            return (own + torch.cholesky_solve(target.T, factor).T).float(), damping
        damping *= 10
    raise CompressError("the second moments of a layer's inputs cannot be factored; they hold NaN or Inf")
