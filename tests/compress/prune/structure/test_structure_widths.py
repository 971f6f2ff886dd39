"""How many channels each layer keeps: the least sum of errors, found by trying all."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from compress.prune.structure.width_allocation import candidates, spread


@pytest.mark.parametrize("seed", range(30))
def test_the_sum_of_errors_is_the_least_there_is(seed: int) -> None:
    chance = random.Random(seed)
    step, layers = chance.choice([1, 3, 8]), chance.randint(1, 4)
    least = step * chance.randint(1, 3)
    choices = [least + step * place for place in range(chance.randint(1, 5))]
    if chance.random() < 0.5:
        choices.append(choices[-1] + chance.randint(1, step))  # all there are may be no multiple
    errors = [
        {width: chance.random() for width in (choices[0], choices[-1], chance.choice(choices))} for _ in range(layers)
    ]
    total = chance.randint(layers * choices[0], layers * choices[-1])

    def lost(widths: tuple[int, ...]) -> float:
        return sum(
            float(np.interp(w, sorted(own), [own[p] for p in sorted(own)]))
            for w, own in zip(widths, errors, strict=True)
        )

    found = spread(errors, choices, total)
    possible = [widths for widths in itertools.product(choices, repeat=layers) if sum(widths) <= total]
    assert tuple(found) in possible
    assert lost(tuple(found)) == pytest.approx(min(map(lost, possible)))


def test_layers_that_matter_less_are_narrower() -> None:
    errors = [{32: 8.0, 64: 1.0, 96: 0.0}, {32: 0.2, 64: 0.1, 96: 0.0}, {32: 3.0, 64: 1.0, 96: 0.0}]
    assert spread(errors, [32, 64, 96], 192) == [96, 32, 64]


def test_less_than_the_least_is_an_error() -> None:
    with pytest.raises(ValueError, match="90"):
        spread([{32: 0.0}] * 3, [32], 90)


def test_candidates_hold_the_ends() -> None:
    assert candidates(range(32, 1024, 32), 1000)[0] == 32
    found = candidates(range(32, 1024, 32), 1030)
    assert found[-1] == 1030
    assert len(found) == 9
    assert candidates([5], 7) == [5, 7]
