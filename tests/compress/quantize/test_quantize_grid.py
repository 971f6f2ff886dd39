"""Scales and zero points."""

from __future__ import annotations

import pytest
import torch

from compress.quantize.grid import Grid, make_grid
from runtime.formats.float8 import FLOAT8_MAXIMUM, round_float8
from runtime.formats.scheme import GridScheme

SCHEMES = [
    GridScheme(bits, "int", symmetric, strategy, 24 if strategy == "group" else None)
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
    for strategy in ("group", "channel", "tensor")
]


def weight(out: int = 6, columns: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, columns, generator=torch.Generator().manual_seed(seed)) ** 3


def error(grid: Grid, w: torch.Tensor, importance: torch.Tensor | None = None) -> float:
    square = (grid.values(grid.codes(w)) - w).square()
    return float((square if importance is None else square * importance).sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("search", ["minmax", "mse", "hessian"])
def test_shapes_range_and_storage(scheme: GridScheme, search: str) -> None:
    w, hessian = weight(), torch.eye(100)
    grid = make_grid(w, scheme, torch.bfloat16, search, None, None, hessian)
    rows = 1 if scheme.strategy == "tensor" else 6
    assert grid.scale.shape == (rows, scheme.groups(100))
    assert torch.equal(grid.scale, grid.scale.to(torch.bfloat16).float()), "a scale is rounded before it is used"
    codes, (low, high) = grid.codes(w), scheme.code_range
    assert codes.min() >= low
    assert codes.max() <= high
    assert torch.equal(codes, codes.round())
    if scheme.symmetric:
        assert grid.zero is None
    else:
        assert grid.zero is not None
        assert torch.equal(grid.zero, grid.zero.round())
        assert grid.zero.min() >= low
        assert grid.zero.max() <= high
        assert (grid.values(grid.codes(torch.zeros_like(w))) == 0).all(), "zero is on every grid"


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_search_never_loses_to_the_range(scheme: GridScheme) -> None:
    w = weight()
    importance = torch.rand(100, generator=torch.Generator().manual_seed(1)) + 0.01
    plain = make_grid(w, scheme, torch.float32, "minmax")
    searched = make_grid(w, scheme, torch.float32, "mse", importance)
    assert error(searched, w, importance) <= error(plain, w, importance) * (1 + 1e-6)
    hessian = torch.diag(importance)
    by_output = make_grid(w, scheme, torch.float32, "hessian", importance, None, hessian)
    assert error(by_output, w, importance) <= error(plain, w, importance) * (1 + 1e-6)


def test_the_longer_side_of_a_symmetric_grid_points_at_the_larger_extreme() -> None:
    scheme = GridScheme(2, "int", True, "channel")
    w = torch.tensor([[2.0, 1.0, 0.0, -1.0], [-2.0, -1.0, 0.0, 1.0]])
    grid = make_grid(w, scheme, torch.float32)
    assert grid.scale[0, 0] < 0 < grid.scale[1, 0]
    torch.testing.assert_close(grid.values(grid.codes(w)), w)


def test_removed_weights_have_no_say() -> None:
    scheme = GridScheme(4, "int", False, "group", 8)
    w = weight(3, 16)
    spoiled, mask = w.clone(), torch.ones_like(w, dtype=torch.bool)
    mask[:, ::4] = False
    spoiled[~mask] = 1e6
    a, b = (
        make_grid(w, scheme, torch.float32, "mse", None, mask),
        make_grid(spoiled, scheme, torch.float32, "mse", None, mask),
    )
    assert torch.equal(a.scale, b.scale)


def test_the_last_group_may_be_shorter() -> None:
    w = weight(4, 40)
    grid = make_grid(w, GridScheme(4, "int", True, "group", 32), torch.float32)
    alone = make_grid(w[:, 32:].contiguous(), GridScheme(4, "int", True, "channel"), torch.float32)
    assert torch.equal(grid.scale[:, 1:], alone.scale)


def test_fp8_saturates_and_empty_groups_have_a_usable_scale() -> None:
    assert round_float8(torch.tensor([1e9, -1e9])).tolist() == [FLOAT8_MAXIMUM, -FLOAT8_MAXIMUM]
    grid = make_grid(weight(), GridScheme(8, "float", True, "tensor"), torch.bfloat16)
    assert torch.isfinite(grid.values(grid.codes(weight()))).all()
    assert error(grid, weight()) < 0.01 * float(weight().square().sum())
    zeros = make_grid(torch.zeros(2, 16), GridScheme(4, "int", True, "group", 8), torch.bfloat16)
    assert (zeros.scale == 1).all()
    tiny = GridScheme(4).storable(torch.tensor([1e-12]), torch.float16)
    assert tiny[0] > 0
    assert tiny[0] == tiny[0].half().float()


def test_positive_scales_are_positive_and_cost_little():
    """Between covering the range and searching both signs, and never negative."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    scheme = GridScheme(4, "int", True, "group", 64)
    errors = {}
    for search in ("minmax", "positive", "mse"):
        grid = make_grid(weight, scheme, torch.bfloat16, search)
        errors[search] = float((grid.values(grid.codes(weight)) - weight).square().sum())
        if search != "mse":
            assert bool((grid.scale > 0).all())
    assert bool((make_grid(weight, scheme, torch.bfloat16, "mse").scale < 0).any())
    assert errors["mse"] < errors["positive"] < errors["minmax"]
    assert errors["positive"] < 1.2 * errors["mse"]
