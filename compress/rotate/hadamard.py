"""Randomized Hadamard matrices (Ashkboos et al., QuaRot, 2024): all entries of one size, so that an outlier is spread evenly."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.rotate.method import RotateConfig, RotateMethod


class HadamardConfig(RotateConfig):
    """Rotate by Hadamard matrices with random signs: an outlier in one dimension becomes a small part of all of them."""

    method: Literal["hadamard"] = Field("hadamard", description="Name of the method.")


def hadamard_matrix(size: int) -> torch.Tensor:
    """Entries 1 and -1, float64 `[size, size]`, whose rows are orthogonal.

    Powers of two are Sylvester's; `2^k` times 12, 20, 28 and so on are Kronecker products with one of Paley's.

    Raises:
        ValueError: a size that neither construction gives, such as an odd one.
    """
    if size < 1:
        raise ValueError(f"there is no matrix of size {size}")
    seed, doublings = size, 0
    while seed % 2 == 0:
        seed, doublings = seed // 2, doublings + 1
    # An odd factor has a matrix from four (sometimes eight or more) times its size on.
    tried = (seed << shift for shift in range(doublings + 1))
    small = next((found for n in tried if (found := _small(n)) is not None), None)
    if small is None:
        raise ValueError(f"no Hadamard matrix of size {size} is known here; method orthogonal has one of every size")
    double = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(small) < size:
        small = torch.kron(double, small)
    return small


def random_hadamard_matrix(size: int, generator: torch.Generator) -> torch.Tensor:
    """An orthogonal float64 `[size, size]`: the Hadamard matrix with its rows negated at random, over the root of its size."""
    signs = torch.randint(0, 2, (size, 1), generator=generator) * 2.0 - 1.0
    return hadamard_matrix(size) * signs.double() / size**0.5


def _small(size: int) -> torch.Tensor | None:
    """The matrix of one or two rows, or Paley's (1933) of `q + 1` or `2 (q + 1)` rows for a prime q; None: there is none."""
    if size <= 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:size, :size]
    if size % 4:
        return None
    if _is_prime(size - 1) and size % 4 == 0:  # q = 3 modulo 4
        core = _jacobsthal(size - 1)
        skew = torch.zeros(size, size, dtype=torch.float64)
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, core
        return skew + torch.eye(size, dtype=torch.float64)
    half = size // 2
    if _is_prime(half - 1) and (half - 1) % 4 == 1:
        conference = torch.zeros(half, half, dtype=torch.float64)
        conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(half - 1)
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(conference, plus) + torch.kron(torch.eye(half, dtype=torch.float64), minus)
    return None


def _jacobsthal(prime: int) -> torch.Tensor:
    """`[i, j]`: 1 where `i - j` is a square modulo the prime, -1 where it is none, 0 on the diagonal."""
    squares = {value * value % prime for value in range(1, prime)}
    of = torch.tensor([0.0, *(1.0 if value in squares else -1.0 for value in range(1, prime))], dtype=torch.float64)
    index = torch.arange(prime)
    return of[(index[:, None] - index[None, :]) % prime]


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, int(value**0.5) + 1))


METHOD = RotateMethod(
    HadamardConfig,
    random_hadamard_matrix,
    summary="rotates by randomized Hadamard matrices, which spread outliers",
    paper="Ashkboos et al., QuaRot, 2024, arXiv 2404.00456",
)
