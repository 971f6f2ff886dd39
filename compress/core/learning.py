"""Gradient descent through rounding: what it loses, with a gradient, and a loop that can be judged on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

#: Pauses of `descend`.
PAUSES = 8


def straight(value: torch.Tensor, rounded: torch.Tensor, width: int | None = None, whole: bool = False) -> torch.Tensor:
    """`rounded` `[..., columns]` with the gradient of `value` (straight-through), and that of scales: what rounding loses grows with the
    largest of the values that share one.

    Args:
        width: columns of a row that share a scale, the last of which may be fewer; None: all. whole: all rows share one, too.
    """
    if whole:
        return straight(value.flatten(), rounded.flatten()).view_as(value)
    columns = value.shape[-1]
    width = width or columns
    largest = torch.nn.functional.pad(value.abs(), (0, -columns % width)).unflatten(-1, (-1, width)).amax(-1)
    growth = largest / largest.detach().clamp_min(1e-30)
    return value + (rounded - value).detach() * growth.repeat_interleave(width, -1)[..., :columns]


def descend(
    parameters: Iterable[torch.Tensor], rate: float, steps: int, loss: Callable[[], torch.Tensor]
) -> Iterator[None]:
    """Adam with a cosine schedule, in place; pauses `PAUSES` times, at even distances, for what was learned to be judged."""
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
