"""Gradient descent through rounding: rounded values with a gradient, and a loop that pauses for its results to be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

#: How often `descend` pauses, so that the caller can measure what was learned and keep the best.
PAUSES = 8


def straight_through(
    value: torch.Tensor, rounded: torch.Tensor, width: int | None = None, whole: bool = False, symmetric: bool = True
) -> torch.Tensor:
    """`rounded` `[..., columns]` with the gradient of `value`, and that of scales: what rounding loses grows with them.

    Args:
        width: columns of a row that share a scale, the last of which may be fewer; None: all. whole: all rows share one, too.
        symmetric: scales follow the largest magnitude, else the range (which holds zero).
    """
    if whole:
        return straight_through(value.flatten(), rounded.flatten(), symmetric=symmetric).view_as(value)
    columns = value.shape[-1]
    width = width or columns
    groups = torch.nn.functional.pad(value, (0, -columns % width)).unflatten(-1, (-1, width))
    span = groups.abs().amax(-1) if symmetric else groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)
    growth = span / span.detach().clamp_min(1e-30)
    return value + (rounded - value).detach() * growth.repeat_interleave(width, -1)[..., :columns]


def descend(
    parameters: Iterable[torch.Tensor], rate: float, steps: int, loss: Callable[[], torch.Tensor]
) -> Iterator[None]:
    """Adam with a cosine schedule, in place; pauses `PAUSES` times, at even distances."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with torch.enable_grad():
            loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step * PAUSES // steps > (step - 1) * PAUSES // steps:
            yield
