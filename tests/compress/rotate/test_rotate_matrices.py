"""Matrices of the stage `rotate`: orthogonal, of every size that they promise, and rotated along the sides that they should."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compress.core.orthogonal import hadamard_matrix
from compress.rotate import METHODS, keep_mean
from compress.rotate.rotation import SideRotation


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 28, 36, 40, 44, 60, 64, 96, 320, 576, 896, 1152])
def test_hadamard_matrices_have_signs_and_orthogonal_rows(size: int) -> None:
    matrix = hadamard_matrix(size)
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [0, 3, 6, 7, 10, 52, 100])
def test_sizes_without_a_known_hadamard_matrix_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size {size}"):
        hadamard_matrix(size)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_rotations_are_orthogonal_and_differ_by_seed(name: str) -> None:
    first, again, other = (METHODS[name].matrix(24, generator(seed)) for seed in (0, 0, 1))
    assert torch.allclose(first @ first.T, torch.eye(24, dtype=torch.float64), atol=1e-12)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_norm_that_takes_the_mean_away_commutes_with_what_keeps_the_mean(name: str) -> None:
    matrix = keep_mean(METHODS[name].matrix(24, generator()))
    ones = torch.ones(24, dtype=torch.float64)
    assert torch.allclose(ones @ matrix, ones, atol=1e-12)
    assert torch.allclose(matrix @ matrix.T, torch.eye(24, dtype=torch.float64), atol=1e-12)
    norm = nn.LayerNorm(24, dtype=torch.float64)
    x = torch.randn(5, 24, generator=generator(1), dtype=torch.float64) + 3
    assert torch.allclose(norm(x @ matrix), norm(x) @ matrix, atol=1e-10)


def test_a_matrix_that_keeps_the_mean_stays() -> None:
    matrix = torch.eye(6, dtype=torch.float64)
    assert torch.equal(keep_mean(matrix), matrix)


def test_two_layers_compute_the_same_with_the_state_between_them_rotated() -> None:
    """In float64: a writer with a bias, a norm's gain, a reader; and values in pieces of 4 behind queries and keys."""
    matrix = METHODS["hadamard"].matrix(12, generator())
    draw = generator(2)
    write, bias = torch.randn(12, 5, generator=draw).double(), torch.randn(12, generator=draw).double()
    read, gain = torch.randn(7, 12, generator=draw).double(), torch.rand(12, generator=draw).double() + 0.5
    x = torch.randn(3, 5, generator=draw).double()
    expected = ((x @ write.T + bias) * gain) @ read.T
    rotated = x @ SideRotation(0, matrix)(write).T + SideRotation(0, matrix)(bias)
    assert torch.allclose(rotated, (x @ write.T + bias) @ matrix, atol=1e-12)
    assert torch.allclose(rotated @ SideRotation(1, matrix, gain)(read).T, expected, atol=1e-12)

    head = METHODS["hadamard"].matrix(4, generator())
    fused = torch.randn(16, 12, generator=draw).double()  # 8 rows of queries and keys, 2 heads of values
    made = SideRotation(0, head, start=8)(fused)
    assert torch.equal(made[:8], fused[:8])
    assert torch.allclose(
        made[8:].view(2, 4, 12), torch.einsum("hnc,nm->hmc", fused[8:].view(2, 4, 12), head), atol=1e-12
    )
