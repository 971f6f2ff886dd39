"""Gradient descent through rounding: forward values, gradients of values and scales, and pauses of the loop."""

from __future__ import annotations

import pytest
import torch

from compress.core.learning import PAUSES, descend, straight_through


def rounded(value: torch.Tensor, width: int) -> torch.Tensor:
    """Integers of 4 bits, whose scale is the largest of each `width` columns over 7."""
    columns = value.shape[-1]
    parts = [value[..., first : first + width] for first in range(0, columns, width)]
    scales = [part.abs().amax(-1, keepdim=True) / 7 for part in parts]
    return torch.cat([(part / scale).round() * scale for part, scale in zip(parts, scales, strict=True)], -1)


@pytest.mark.parametrize("width", [1, 4, 5, 11, 16, None])
def test_what_is_rounded_stays_and_groups_may_be_ragged(width: int | None) -> None:
    value = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    codes = rounded(value, width or 11)
    assert torch.equal(straight_through(value, codes, width), value + (codes - value))


@pytest.mark.parametrize("width", [4, 5, 11])
def test_gradients_are_those_of_scales_with_the_codes_held(width: int) -> None:
    """Codes do not move a little further on, so what is rounded is codes times scale plus what is lost, in units of the scale."""
    generator = torch.Generator().manual_seed(width)
    value = torch.randn(3, 11, generator=generator, dtype=torch.float64)
    codes, direction = rounded(value, width), torch.randn(3, 11, generator=generator, dtype=torch.float64)
    given = value.clone().requires_grad_()
    straight_through(given, codes, width).mul(direction).sum().backward()
    columns = [slice(first, first + width) for first in range(0, 11, width)]

    def surrogate(moved: torch.Tensor) -> torch.Tensor:
        lost = torch.cat(
            [(codes - value)[:, c] * moved[:, c].abs().amax(1, keepdim=True) / value[:, c].abs().amax(1, keepdim=True) for c in columns], 1
        )  # fmt: skip
        return ((moved + lost) * direction).sum()

    step = 1e-6
    for row in range(3):
        for column in range(11):
            moved = torch.zeros_like(value)
            moved[row, column] = step
            slope = (surrogate(value + moved) - surrogate(value - moved)) / (2 * step)
            assert given.grad is not None
            assert abs(float(given.grad[row, column] - slope)) < 1e-6


def test_a_scale_of_the_whole_tensor_is_that_of_its_largest() -> None:
    value = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    lost = torch.full((4, 6), 0.5)
    straight_through(value, value.detach() + lost, whole=True).sum().backward()
    assert value.grad is not None
    largest = value.abs().argmax()
    others = torch.arange(24) != largest
    assert torch.equal(value.grad.flatten()[others], torch.ones(23))
    grown = lost.sum() / value.abs().max() * value.flatten()[largest].sign()
    assert float(value.grad.flatten()[largest]) == pytest.approx(float(1 + grown), rel=1e-5)


def test_scales_of_a_range_follow_both_ends() -> None:
    value = torch.tensor([[5.0, 5.5, 6.0, -1.0]], requires_grad=True)
    straight_through(value, value.detach() + 0.7, symmetric=False).sum().backward()
    lost = 4 * 0.7 / 7  # over the range
    assert value.grad is not None
    assert torch.allclose(value.grad, torch.tensor([[1, 1, 1 + lost, 1 - lost]]))
    above = torch.tensor([[5.0, 5.5, 6.0]], requires_grad=True)  # the range holds zero
    straight_through(above, above.detach() + 0.7, symmetric=False).sum().backward()
    assert above.grad is not None
    assert torch.allclose(above.grad, torch.tensor([[1, 1, 1 + 3 * 0.7 / 6]]))


def test_zeros_have_gradients_too() -> None:
    value = torch.zeros(2, 8, requires_grad=True)
    straight_through(value, torch.zeros(2, 8), 4).sum().backward()
    assert value.grad is not None
    assert bool(torch.isfinite(value.grad).all())


@pytest.mark.parametrize("steps", [PAUSES, 13, 100])
def test_descent_pauses_at_even_distances_and_the_last_time_at_the_end(steps: int) -> None:
    value, goal = torch.zeros(5, requires_grad=True), torch.arange(-2.0, 3.0)
    made: list[int] = [0]

    def loss() -> torch.Tensor:
        made[0] += 1
        return (value - goal).square().sum()

    seen = []
    with torch.no_grad():  # gradients are turned on where they are needed
        for _ in descend([value], 0.3, steps, loss):
            seen.append(made[0])
    assert seen == [-(-steps * part // PAUSES) for part in range(1, PAUSES + 1)]
    if steps == 100:
        assert torch.allclose(value, goal, atol=0.05)
