"""Contract of a representation, held by every kind of grid: rounding, parameters, tensors and configuration agree with each other."""

from __future__ import annotations

import pytest
import torch

from runtime.formats.base import OwnFormat
from runtime.formats.grid import GridScheme
from runtime.formats.representation import TensorSpec
from runtime.formats.scheme import CompressedWeight, Scheme

GRIDS = [
    GridScheme(4, group_size=8),
    GridScheme(3, symmetric=False, group_size=10),
    GridScheme(8, strategy="channel"),
    GridScheme(2, symmetric=False, strategy="tensor"),
    GridScheme(8, "float", strategy="channel"),
    GridScheme(8, "float", strategy="tensor"),
]
SHAPE = (7, 24)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * 0.1


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.describe())
def test_rounded_values_are_the_nearest_and_what_codes_stand_for(grid: GridScheme, weight: torch.Tensor) -> None:
    parameters = grid.fit(weight, torch.bfloat16)
    codes = grid.round(weight, parameters)
    assert codes.dtype == grid.code_dtype
    dense = grid.dequantize(codes, parameters, torch.float32)
    values = torch.stack([grid.nearest(weight[:, j : j + 1].T.contiguous(), parameters, j)[0][0] for j in range(24)], 1)
    torch.testing.assert_close(values, dense, rtol=1e-6, atol=1e-7)
    # Rounding what is on the grid changes nothing, and no other code of an integer grid is nearer, but beyond its ends.
    assert torch.equal(grid.round(dense, parameters).float(), codes.float())
    if grid.type == "int":
        scale = grid.spread(parameters["scale"].float(), 24)
        low, high = grid.code_range
        inner = (codes > low) & (codes < high)
        assert bool(((weight - dense).abs() <= 0.5001 * scale.abs().expand(SHAPE))[inner].all())


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.describe())
def test_tensors_hold_codes_and_parameters_bit_for_bit(grid: GridScheme, weight: torch.Tensor) -> None:
    parameters = grid.fit(weight, torch.bfloat16)
    codes = grid.round(weight, parameters)
    tensors = grid.encode(codes, parameters)
    assert {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()} == grid.tensors(SHAPE, torch.bfloat16)
    back, again = grid.decode(tensors, SHAPE)
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
    assert again.keys() == parameters.keys()
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)
    # As a format of its own, which is how representations of other packages lie on the disk.
    storage, scheme = OwnFormat(GridScheme), Scheme(grid)
    packed = storage.pack(CompressedWeight.of(codes, parameters, None, scheme, torch.bfloat16))
    rows = torch.tensor([6, 0, 3])
    some = storage.unpack(storage.select_rows(packed, scheme, SHAPE, rows), scheme, (3, 24), torch.bfloat16)
    whole = storage.unpack(packed, scheme, SHAPE, torch.bfloat16)
    assert torch.equal(some.dequantize(), whole.dequantize()[rows])


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.describe())
def test_the_configuration_comes_back(grid: GridScheme) -> None:
    assert Scheme.from_config(Scheme(grid).to_config()) == Scheme(grid)


def test_fields_of_an_unknown_representation_are_refused() -> None:
    with pytest.raises(ValueError, match="lattice"):
        Scheme.from_config({"weights": {"representation": "lattice", "bits": 2}})
