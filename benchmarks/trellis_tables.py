"""Make the tables of runtime/formats/trellis.py: Lloyd's algorithm on normally distributed numbers.

Each round searches the words of fresh numbers, then sets the entries to their least-squares values. Printed are the tables and the mean
squared error on other numbers, with all 64 states tried and with as many as the search of a weight tries.

    python benchmarks/trellis_tables.py
"""

from __future__ import annotations

import argparse

import torch

from runtime.formats.trellis import BASE, TRIES, UNIT, VECTOR, search, windows

MOST = 63  # what 6 bits hold


def numbers(count: int, generator: torch.Generator) -> torch.Tensor:
    """`[16, count]` in units of the tables."""
    return torch.randn(VECTOR, count, generator=generator) * UNIT


def learn(seed: int, rounds: int, count: int) -> torch.Tensor:
    """Entries float32 `[32]`, low nibbles first, without the base."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(256)
    parts = torch.nn.functional.one_hot(torch.stack((window & 15, window >> 4), 1) + torch.tensor([0, 16]), 32)
    sums = parts.sum(1).float()  # [256, 32]: which entries a window adds
    entries = torch.randn(32, generator=generator) * UNIT / 2**0.5
    for step in range(rounds):
        target, values = numbers(count, generator), sums @ entries
        words = search(target, values=values, tries=4 if step < rounds - 3 else 16)
        taken = windows(words, window.float()).long().flatten()
        often = torch.bincount(taken, minlength=256).float()
        total = torch.zeros(256).index_add_(0, taken, target.flatten())
        normal = sums.T @ (sums * often[:, None]) + 1e-3 * torch.eye(32)
        entries = torch.linalg.solve(normal, sums.T @ total)
    return entries


def tables(entries: torch.Tensor) -> tuple[list[int], list[int]]:
    """Rounded tables whose sums are all in 0..63."""
    low, high = entries.view(2, 16)
    low, high = low - low.min(), high + low.min() + BASE
    low, high = low.round().int(), high.round().int()
    least = min(0, int(high.min()))
    low, high = low - least, high.clamp(min=0)
    high = high.clamp(max=MOST - int(low.max()))
    return low.tolist(), high.tolist()


def error(values: torch.Tensor, tries: int) -> float:
    """Of numbers with variance 1 that the tables were not made from."""
    target = numbers(1 << 14, torch.Generator().manual_seed(1 << 20))
    return float((windows(search(target, values=values, tries=tries), values) - target).square().mean()) / UNIT**2


def main() -> None:
    """Try several seeds and print the best tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--count", type=int, default=1 << 13, help="words a round")
    given = parser.parse_args()
    found = []
    for seed in range(given.seeds):
        low, high = tables(learn(seed, given.rounds, given.count))
        values = (torch.tensor(low) + torch.tensor(high)[:, None] - BASE).flatten().float()
        found.append((error(values, TRIES), low, high, values))
        print(f"seed {seed}: {found[-1][0]:.5f}, values from {int(values.min())} to {int(values.max())}", flush=True)
    least, low, high, values = min(found, key=lambda one: one[0])
    print(f"LOW = {tuple(low)}\nHIGH = {tuple(high)}\nerror {least:.5f}, with all states tried {error(values, 64):.5f}")


if __name__ == "__main__":
    main()
