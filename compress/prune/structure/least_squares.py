"""Least-squares fits of layers to what they gave before something was removed, from second moments of their inputs."""

from __future__ import annotations

import torch

from runtime.errors import CompressError

_TRIES = 5


def damped(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """The moments with `damping` times their mean diagonal added to it."""
    mean = float(moments.diagonal().mean())
    return moments + torch.eye(len(moments), dtype=moments.dtype) * (damping * mean if mean > 0 else 1.0)


def energy(weight: torch.Tensor, moments: torch.Tensor) -> float:
    """Mean squared norm of what a weight `[out, in]` makes of inputs of these second moments `[in, in]`."""
    return float(((weight @ moments) * weight).sum())


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
    return nearest(wide[:, kept], all_moments[kept][:, kept], wide @ all_moments[:, kept], damping)


def nearest(
    prior: torch.Tensor, moments: torch.Tensor, target: torch.Tensor, damping: float
) -> tuple[torch.Tensor, float]:
    """The weight whose outputs over inputs `x` come nearest to given outputs `y`.

    Minimizes `E |y - W x|^2 + lambda |W - prior|^2`.

    Args:
        prior: `[out, in]`. moments: `[in, in]`, mean of `x x^T`. target: `[out, in]`, mean of `y x^T`.
        damping: lambda as a share of the mean diagonal of the moments; ten times more where the system cannot be solved.

    Returns:
        float32 `[out, in]`, and the damping that it took.

    Raises:
        CompressError: the moments cannot be factored however they are damped.
    """
    own, corner = prior.double(), moments.double()
    # Of the difference to the prior: (W - prior) (H + lambda) = target - prior H.
    rest = target.double() - own @ corner
    for _ in range(_TRIES):
        factor, failed = torch.linalg.cholesky_ex(damped(corner, damping))
        if not int(failed):
            return (own + torch.cholesky_solve(rest.T, factor).T).float(), damping
        damping *= 10
    raise CompressError("the second moments of a layer's inputs cannot be factored; they hold NaN or Inf")
