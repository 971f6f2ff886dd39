"""Heads found in rows of numbers: which span of which buffer queries, keys and values are, scaled and rotated how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from runtime.engines.program.operations import Span


@dataclass(frozen=True)
class Turn:
    """A rotation by numbers: cosines and sines `[2, tokens, rotary / 2]` of the trace; `pairs` as of `Heads`.

    Attributes:
        apart: the model then takes pairs apart, all first ones before all second ones: if queries and keys are so, scores are the same.
    """

    index: int
    pairs: bool
    cosine: torch.Tensor
    sine: torch.Tensor
    apart: bool = False

    @property
    def rotary(self) -> int:
        """Numbers of a head that it rotates."""
        return 2 * self.cosine.shape[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[2, tokens, heads, head_dim]`, rotated."""
        out, n = x.clone(), self.rotary
        cosine, sine = self.cosine[:, :, None], self.sine[:, :, None]
        first, second = (slice(0, n, 2), slice(1, n, 2)) if self.pairs else (slice(0, n // 2), slice(n // 2, n))
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cosine - b * sine, b * cosine + a * sine
        return out


@dataclass(frozen=True)
class Found:
    """Where heads come from: the first of `bases` is where the first head's numbers begin in the rows of node `name`."""

    name: str
    bases: tuple[int, ...]
    factor: float
    turn: Turn | None


def same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> bool:
    """Whether every token's numbers agree."""
    if found.shape != wanted.shape:
        return False
    error = (found - wanted).flatten(2).norm(dim=-1)
    return bool((error <= tolerance * wanted.flatten(2).norm(dim=-1) + 1e-30).all())


def find_heads(
    heads: torch.Tensor,
    nodes: Sequence[tuple[str, torch.Tensor]],
    turns: Sequence[Turn] = (),
    factors: Sequence[float] = (1.0,),
) -> Found | None:
    """Of which node's rows `[2, tokens, width]` heads `[2, heads, tokens, head_dim]` are made.

    Args:
        turns: rotations that they may have gone through; none is tried first.
        factors: that they may be multiplied by.
    """
    wanted, width = heads.transpose(1, 2), heads.shape[-1]
    fitting = [turn for turn in turns if turn.rotary <= width]
    found = _find(wanted, nodes, (None, *(turn for turn in fitting if not turn.apart)), factors)
    for turn in fitting:
        if found is None and turn.apart:
            n = turn.rotary
            together = wanted.clone()
            together[..., 0:n:2], together[..., 1:n:2] = wanted[..., : n // 2], wanted[..., n // 2 : n]
            found = _find(together, nodes, (turn,), factors)
    return found


def _find(
    wanted: torch.Tensor,
    nodes: Iterable[tuple[str, torch.Tensor]],
    turns: Sequence[Turn | None],
    factors: Sequence[float],
) -> Found | None:
    scales = sorted(
        {1.0, *(float(turn.cosine[0, 0, 0]) for turn in turns if turn is not None)}, key=lambda each: abs(each - 1.0)
    )
    for name, rows in nodes:
        for factor in factors:
            bases = _bases(wanted[0, 0] / factor, rows[0, 0], scales)
            if bases is None:
                continue
            plain = rows[..., torch.tensor(bases)[:, None] + torch.arange(wanted.shape[-1])] * factor
            for turn in turns:
                if same(plain if turn is None else turn(plain), wanted):
                    return Found(name, tuple(bases), factor, turn)
    return None


def find_parts(
    heads: torch.Tensor, nodes: Sequence[tuple[str, torch.Tensor]], turns: Sequence[Turn], factors: Sequence[float]
) -> tuple[Found, Found | None] | None:
    """As `find_heads`, also of heads in two parts from different places, of which only the second is rotated (latent attention)."""
    whole = find_heads(heads, nodes, turns, factors)
    if whole is not None:
        return whole, None
    for rotary in dict.fromkeys(turn.rotary for turn in turns if turn.rotary < heads.shape[-1]):
        first = find_heads(heads[..., :-rotary], nodes, (), factors)
        second = find_heads(heads[..., -rotary:], nodes, [turn for turn in turns if turn.rotary == rotary], factors)
        if first is not None and second is not None and first.factor == second.factor:
            return first, second
    return None


def _bases(heads: torch.Tensor, row: torch.Tensor, scales: Sequence[float]) -> list[int] | None:
    """Where each head `[heads, head_dim]` of the token at position 0 begins in its row; None: it is not there.

    There cosines are a scale and sines are 0, so that each number is one of the row, maybe scaled.
    """
    width, (order, places) = heads.shape[1], row.sort()
    best = torch.full_like(heads, float("inf"))
    index = torch.zeros_like(heads, dtype=torch.int64)
    for scale in scales:
        wanted = (heads / scale).contiguous()
        above = torch.searchsorted(order, wanted).clamp(max=len(order) - 1)
        for near in (above, (above - 1).clamp(min=0)):
            error = (order[near] - wanted).abs() / wanted.abs().clamp(min=1e-6)
            closer = error < best
            best, index = torch.where(closer, error, best), torch.where(closer, places[near], index)
    begins = index - torch.arange(width)
    found = begins.median(dim=1).values
    agree = (begins == found[:, None]).float().mean(dim=1)
    if bool((agree < 0.6).any()) or int(found.min()) < 0 or int(found.max()) + width > len(row):
        return None
    return [int(each) for each in found]


def as_span(buffer: str, bases: Sequence[int]) -> Span | None:
    """Heads that begin there, as a span; None: they lie irregularly."""
    step = bases[1] - bases[0] if len(bases) > 1 else 0
    group = next((h for h, base in enumerate(bases) if base != bases[0] + h * step), len(bases))
    group_step = bases[group] - bases[0] if group < len(bases) else 0
    found = Span(buffer, bases[0], step, group, group_step)
    wanted = [found.at + h // group * group_step + h % group * step for h in range(len(bases))]
    return found if wanted == list(bases) else None


def distinct(bases: Sequence[int]) -> tuple[int, ...]:
    """One of each run of the same: keys that were repeated for the queries that share them."""
    count = len(dict.fromkeys(bases))
    repeats = len(bases) // count
    once = tuple(bases[::repeats])
    return once if [each for each in once for _ in range(repeats)] == list(bases) else tuple(bases)
