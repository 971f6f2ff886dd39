"""Orthogonal matrices: Hadamard ones, all entries of one size, and random ones of any size."""

from __future__ import annotations

import torch


def hadamard_matrix(size: int) -> torch.Tensor:
    """Entries 1 and -1, float64 `[size, size]`, whose rows are orthogonal.

    Powers of two are Sylvester's; `2^k` times 12, 20, 28 and so on are Kronecker products with one of Paley's.

    Raises:
        ValueError: a size that neither construction gives, such as an odd one.
    """
    if reason := why_not(size):
        raise ValueError(reason)
    order = _order(size)
    assert order is not None
    small = _small(order)
    double = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(small) < size:
        small = torch.kron(double, small)
    return small


def random_hadamard_matrix(size: int, generator: torch.Generator) -> torch.Tensor:
    """An orthogonal float64 `[size, size]`: the Hadamard matrix with its rows negated at random, over the root of its size."""
    signs = torch.randint(0, 2, (size, 1), generator=generator) * 2.0 - 1.0
    return hadamard_matrix(size) * signs.double() / size**0.5


def orthogonal_matrix(size: int, generator: torch.Generator) -> torch.Tensor:
    """A random float64 `[size, size]`, uniform over the orthogonal ones: of the QR decomposition of a Gaussian matrix, with the signs that
    make it so (Mezzadri, 2007)."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def keep_mean(matrix: torch.Tensor) -> torch.Tensor:
    """The rotation followed by a reflection, so that a vector of equal numbers stays as it is.

    A norm that takes the mean away first (LayerNorm) then gives the rotated output for a rotated input.
    """
    ones = torch.full((len(matrix),), len(matrix) ** -0.5, dtype=matrix.dtype)
    difference = ones @ matrix - ones
    size = difference.norm()
    if size < 1e-12:
        return matrix
    axis = difference / size
    return matrix - 2 * torch.outer(matrix @ axis, axis)


def why_not(size: int) -> str | None:
    """The reason there is no matrix of a size; None: there is one."""
    if _order(size) is None:
        return f"no Hadamard matrix of size {size} is known here; method orthogonal has one of every size"
    return None


def _order(size: int) -> int | None:
    """Size of the smallest matrix that makes one of `size` when it is doubled; None where neither construction has any."""
    odd = size
    while odd > 0 and odd % 2 == 0:
        odd //= 2
    # An odd factor has a matrix from four (sometimes eight or more) times its size on.
    tried = (odd << shift for shift in range(size.bit_length()))
    return next((n for n in tried if 0 < n <= size and (n <= 2 or _skew(n) or _symmetric(n))), None)


def _skew(size: int) -> bool:
    """Whether Paley's first construction has it: `q + 1` rows for a prime q = 3 modulo 4."""
    return size % 4 == 0 and _is_prime(size - 1)


def _symmetric(size: int) -> bool:
    """Whether Paley's second construction has it: `2 (q + 1)` rows for a prime q = 1 modulo 4."""
    return size % 4 == 0 and (size // 2 - 1) % 4 == 1 and _is_prime(size // 2 - 1)


def _small(size: int) -> torch.Tensor:
    """The matrix of one or two rows, or Paley's (1933)."""
    if size <= 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:size, :size]
    if _skew(size):
        skew = torch.eye(size, dtype=torch.float64)
        skew[0, 1:], skew[1:, 0] = 1, -1
        skew[1:, 1:] += _jacobsthal(size - 1)
        return skew
    half = size // 2
    conference = torch.zeros(half, half, dtype=torch.float64)
    conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(half - 1)
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(conference, plus) + torch.kron(torch.eye(half, dtype=torch.float64), minus)


def _jacobsthal(prime: int) -> torch.Tensor:
    """`[i, j]`: 1 where `i - j` is a square modulo the prime, -1 where it is none, 0 on the diagonal."""
    squares = {value * value % prime for value in range(1, prime)}
    of = torch.tensor([0.0, *(1.0 if value in squares else -1.0 for value in range(1, prime))], dtype=torch.float64)
    index = torch.arange(prime)
    return of[(index[:, None] - index[None, :]) % prime]


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, int(value**0.5) + 1))
