"""Best values of the kept weights, given which ones are removed: least squares on the layer's outputs, row by row."""

from __future__ import annotations

import torch

from compress import mapped


def reconstruct(
    target: torch.Tensor,
    start: torch.Tensor,
    mask: torch.Tensor,
    hessian: torch.Tensor,
    damping: float,
    iterations: int,
) -> torch.Tensor:
    """Minimise `(t - v)^T (H + d I) (t - v)` over `v` that are zero where the mask says so.

    All rows at once by conjugate gradients (Jacobi-preconditioned), one matrix product an iteration; the error falls with
    every iteration, so the result is never worse than `start`.

    Args:
        target: float32 `[in, rows]`.
        start: first guess, zero where removed.
        mask: bool `[in, rows]`, True = kept.
        hessian: `[in, in]`.
        damping: `d` as a fraction of the mean of the diagonal.
    """
    if iterations == 0:
        return start
    energy = mapped.diagonal(hessian)
    extra = damping * float(energy.mean())
    inverse = (1 / (energy + extra).clamp(min=1e-30))[:, None]
    values = start.clone()
    difference = target - values
    residual = mapped.product(hessian, difference).add_(difference, alpha=extra).mul_(mask)
    del difference
    direction = residual * inverse
    old = (residual * direction).sum(0)
    for _ in range(iterations):
        product = mapped.product(hessian, direction).add_(direction, alpha=extra)
        step = old / (direction * product).sum(0).clamp(min=1e-30)
        values.addcmul_(direction, step[None, :])
        residual.addcmul_(product.mul_(mask), step[None, :], value=-1)
        conditioned = torch.mul(residual, inverse, out=product)
        new = (residual * conditioned).sum(0)
        direction.mul_((new / old.clamp(min=1e-30))[None, :]).add_(conditioned)
        old = new
    return values
