"""Rankings of channels and the refit of their readers, against brute force and plain loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from compress.core.statistics import StatisticsCollector
from compress.prune.structure import METHODS
from compress.prune.structure.least_squares import refit
from compress.prune.structure.method import View
from compress.prune.structure.rankings.gradient_free import convex_masking


def inputs(tokens: int, channels: int, seed: int = 0, mixed: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(tokens, channels, generator=generator)
    mixing = torch.randn(channels, channels, generator=generator) * mixed / channels**0.5
    return base * torch.rand(channels, generator=generator).add(0.1) + base @ mixing


def view(x: torch.Tensor, weight: torch.Tensor, count: int, kept: int, **more: Any) -> View:
    collector = StatisticsCollector(x.shape[1])
    collector.add(x)
    return View(
        count, kept, torch.Generator().manual_seed(0), columns=weight, weights=[weight.T.reshape(count, -1)],
        statistics=collector.finish(), **more,
    )  # fmt: skip


def rank(name: str, seen: View, **fields: Any) -> torch.Tensor:
    method = METHODS[name]
    remove = {"remove": fields.pop("remove")} if "remove" in fields else {}
    config = method.config.model_validate({"method": name, "keep": seen.kept, **remove, **fields})
    return method.rank(seen, config)


def best_error(x: torch.Tensor, weight: torch.Tensor, kept: list[int]) -> float:
    """Of the best weights over these channels, by torch's own least squares."""
    target = x @ weight.T
    found = torch.linalg.lstsq(x[:, kept], target, driver="gelsd").solution
    return float((target - x[:, kept] @ found).square().sum())


@pytest.mark.parametrize("seed", range(5))
def test_a_refit_reader_errs_as_little_as_least_squares_allow(seed: int) -> None:
    x = inputs(200, 12, seed).double()
    weight = torch.randn(7, 12, generator=torch.Generator().manual_seed(seed)).double()
    kept = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:8].sort().values
    new, damping = refit(weight, (x.T @ x / len(x)).float(), kept, 1e-6)
    assert damping == 1e-6
    error = float((x @ weight.T - x[:, kept] @ new.double().T).square().sum())
    assert error == pytest.approx(best_error(x, weight, kept.tolist()), rel=1e-3)
    assert error < float((x @ weight.T - x[:, kept] @ weight[:, kept].T).square().sum())


def test_channels_that_were_never_seen_keep_their_weights() -> None:
    x = inputs(50, 10)
    x[:, [2, 7]] = 0
    weight = torch.randn(4, 10)
    kept = torch.tensor([0, 2, 3, 5, 7])
    new, _ = refit(weight, x.T @ x / len(x), kept, 0.01)
    assert torch.allclose(new[:, [1, 4]], weight[:, [2, 7]], atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_first_channel_to_go_is_the_one_the_others_can_best_make_up_for(seed: int) -> None:
    x = inputs(300, 8, seed)
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed + 10))
    found = rank("obs", view(x, weight, 8, 7), damping=1e-6, at_once=1)
    errors = [best_error(x, weight, [c for c in range(8) if c != gone]) for gone in range(8)]
    assert int(found.argmin()) == errors.index(min(errors))


def test_going_one_by_one_is_near_the_best_of_all_choices() -> None:
    ratios: dict[str, list[float]] = {"obs": [], "wanda": []}
    for seed in range(12):
        x = inputs(200, 8, seed)
        weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        best = min(best_error(x, weight, list(some)) for some in itertools.combinations(range(8), 5))
        for name, fields in (("obs", {"damping": 1e-6, "at_once": 1}), ("wanda", {})):
            kept = rank(name, view(x, weight, 8, 5), **fields).argsort(descending=True)[:5].tolist()
            ratios[name].append(best_error(x, weight, kept) / best)
    assert sorted(ratios["obs"])[6] < 1.1
    assert sum(ratios["obs"]) < 0.8 * sum(ratios["wanda"])


@pytest.mark.parametrize("each", [1, 3])
def test_of_two_units_that_say_the_same_only_one_goes(each: int) -> None:
    x = inputs(300, 6 * each, 3)
    x[:, 2 * each : 3 * each] = x[:, :each]  # unit 2 is unit 0 again
    weight = torch.randn(5, 6 * each)
    found = rank("obs", view(x, weight, 6, 5), damping=1e-6, at_once=1)
    assert int(found.argmin()) in (0, 2)
    both = rank("obs", view(x, weight, 6, 4), damping=1e-6, at_once=1).argsort()[:2].tolist()
    assert set(both) != {0, 2}


def test_units_go_in_the_same_turns_however_many_go_at_once_when_they_are_independent() -> None:
    x = torch.randn(4000, 10) * torch.arange(1, 11)
    weight = torch.ones(3, 10)
    orders = [rank("obs", view(x, weight, 10, 4), at_once=n).argsort().tolist() for n in (1, 3)]
    assert orders[0] == orders[1] == list(range(10))


@pytest.mark.parametrize("each", [1, 4])
def test_wanda_and_magnitude_are_what_they_say(each: int) -> None:
    x, weight = inputs(100, 5 * each), torch.randn(6, 5 * each)
    seen = view(x, weight, 5, 3)
    norms = x.square().mean(0).sqrt()
    expected = [
        float((weight[:, u * each : (u + 1) * each].abs() * norms[u * each : (u + 1) * each]).sum()) for u in range(5)
    ]
    torch.testing.assert_close(rank("wanda", seen), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    sizes = [float(weight[:, u * each : (u + 1) * each].norm()) for u in range(5)]
    torch.testing.assert_close(rank("magnitude", seen), torch.tensor(sizes), rtol=1e-4, atol=1e-4)


def test_convex_masks_come_nearest_to_their_filters() -> None:
    filters = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    found, steps = convex_masking(filters, 1.5, 1e-5)
    assert steps > 1
    kernel = torch.exp(-(torch.cdist(filters, filters) / 1.5).square()).double()
    for each in range(9):  # the column of one filter, minimized by projected gradients from many places
        mask = torch.full((9,), 1 / 9, dtype=torch.float64)
        for _ in range(4000):
            mask = (mask - 0.05 * (kernel @ mask - kernel[:, each])).clamp_min(0)
        assert float(found[each]) == pytest.approx(float(mask[each]), abs=0.05)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("activity", ["rms", "mean"])
def test_gradient_free_weighs_what_a_channel_stands_for_by_its_size(activity: str, each: int) -> None:
    x, weight = inputs(300, 4 * each), torch.randn(6, 4 * each, generator=torch.Generator().manual_seed(3))
    x[:, 1] = x[:, 1].sign() * x[:, 1].abs() ** 3  # root mean square and mean of sizes tell apart
    stands, _ = convex_masking(weight.T, 1.5, 0.001)
    sizes = x.square().mean(0).sqrt() if activity == "rms" else x.abs().mean(0)
    expected = (stands * sizes / sizes.max()).view(4, each).sum(1)
    found = rank("gradient_free", view(x, weight, 4, 2), activity=activity, width=1.5, convergence=0.001)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_filter_that_others_repeat_stands_for_less() -> None:
    filters = torch.randn(8, 6)
    filters[5] = filters[2] + 0.01 * torch.randn(6)
    found, _ = convex_masking(filters, None, 0.001)
    assert set(found.argsort()[:2].tolist()) == {2, 5}


def test_random_is_repeatable_and_prefix_keeps_the_first() -> None:
    x, weight = inputs(20, 6), torch.randn(3, 6)
    assert torch.equal(rank("random", view(x, weight, 6, 3)), rank("random", view(x, weight, 6, 3)))
    assert rank("prefix", view(x, weight, 6, 3)).argsort(descending=True)[:3].tolist() == [0, 1, 2]
