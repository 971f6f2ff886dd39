"""Search of scales on two levels (`runtime.formats.k_quant`): one of every group, as an integer times what its block has in fp16.

First every group gets the scale (and minimum) that suits it, then every block the factor whose multiples are nearest to those, and last
every group the best pair of multiples, by the weighted error of the rounded weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.formats.k_quant import KQuant

#: `(groups [rows, n], scales [candidates, rows], minima likewise or None, cost) -> index [rows]` of the candidate with the smallest error.
Choose = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]

#: Fractions of the range of a group that are tried, of either end where there is a minimum: two bits gain from much clipping.
_ENDS = (1.06, 1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
_ENDS_OF_2_BITS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
#: The largest scale of a block is tried at so many levels, from a little above the largest one down to half of it.
_LEVELS = 26
_TINY = 1e-30  # of a group of zeros: any scale will do, and a block is not to be guided by it


def fit(
    weight: torch.Tensor, scheme: KQuant, cost: torch.Tensor | None, choose: Choose, narrower: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales, and minima where the scheme has any, float32 `[rows, groups]`, for `weight [rows, columns]` of whole blocks.

    Args:
        cost: weights `[columns]` of the squared error, or its matrix `[columns, columns]`; None: all alike.
        narrower: other ranges than the covering one are tried.
    """
    kind, (rows, columns) = scheme.facts, weight.shape
    spans = [slice(start, start + kind.width) for start in range(0, columns, kind.width)]
    parts = [weight[:, span].contiguous() for span in spans]
    costs = [None if cost is None else cost[span] if cost.dim() == 1 else cost[span, span] for span in spans]
    weights = [_diagonal(own, part) for own, part in zip(costs, parts, strict=True)]

    free = [
        _free(part, scheme, own, diagonal, choose, narrower)
        for part, own, diagonal in zip(parts, costs, weights, strict=True)
    ]
    scale = torch.stack([found[0] for found in free], dim=1)
    minimum = None if scheme.symmetric else torch.stack([found[1] for found in free], dim=1)
    curvature = torch.stack([found[2] for found in free], dim=1)
    d = _factor(scale, curvature, scheme, minimum=False)
    scale = scheme.on_levels(scale, d)
    dmin = None
    if minimum is not None:
        # The scales have moved: what is left over of each group says where its minimum belongs.
        again = [_minimum(part, scheme, scale[:, g], minimum[:, g], weights[g]) for g, part in enumerate(parts)]
        minimum = torch.stack(again, dim=1)
        total = torch.stack([w.sum() for w in weights]).expand(rows, -1)
        dmin = _factor(minimum, total, scheme, minimum=True)
        minimum = scheme.on_levels(minimum, dmin, minimum=True)
    for g, part in enumerate(parts):
        tried, shifts = _neighbours(scheme, scale[:, g], d[:, g], minimum, dmin, g)
        best = choose(part, tried, shifts, costs[g])[None]
        scale[:, g] = tried.gather(0, best)[0]
        if minimum is not None and shifts is not None:
            minimum[:, g] = shifts.gather(0, best)[0]
    return scale, minimum


def factors_of(scheme: KQuant, products: torch.Tensor, minimum: bool = False) -> torch.Tensor:
    """What scales (or minima) `[groups, rows]` are integer multiples of, likewise; fp16 numbers, never zero."""
    found = scheme.factor(scheme.levels(products.T, minimum)[0])
    return found.repeat_interleave(scheme.facts.block // scheme.facts.width, 1).T.contiguous()


def _diagonal(cost: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """Weights `[n]` of single columns."""
    if cost is None:
        return torch.ones(part.shape[1], device=part.device)
    return cost if cost.dim() == 1 else cost.diagonal()


def _free(
    part: torch.Tensor, scheme: KQuant, cost: torch.Tensor | None, weights: torch.Tensor, choose: Choose, narrower: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best scale and minimum `[rows]` of a group that has them to itself, and the curvature of its error along the scale."""
    scales, minima = _candidates(part, scheme, narrower)
    if len(scales) == 1:
        best = torch.zeros(1, part.shape[0], dtype=torch.long, device=part.device)
    else:
        best = choose(part, scales, minima, cost)[None]
    scale, minimum = scales.gather(0, best)[0], None if minima is None else minima.gather(0, best)[0]
    shift = None if minimum is None else minimum[:, None]
    codes = scheme.codes(part, scale[:, None], shift)
    square = codes.square() @ weights
    if minimum is None:
        found = torch.where(square > 0, (codes * part) @ weights / square.clamp(min=_TINY), scale)
        if narrower:
            scale = torch.where(found.abs() > _TINY, found, scale)
        return scale, torch.zeros_like(scale), square
    total = weights.sum().clamp(min=_TINY)
    mean, target = codes @ weights / total, part @ weights / total
    spread = square - total * mean.square()
    if narrower:
        # Weighted least squares of part = scale * codes - minimum; a minimum is never negative.
        fitted = ((codes * part) @ weights - total * mean * target) / spread.clamp(min=_TINY)
        shifted = fitted * mean - target
        through = (codes * part) @ weights / square.clamp(min=_TINY)
        fitted, shifted = torch.where(shifted < 0, through, fitted), shifted.clamp(min=0)
        good = (spread > 1e-6 * square) & (fitted > _TINY)
        scale, minimum = torch.where(good, fitted, scale), torch.where(good, shifted, minimum)
    return scale, minimum, spread


def _candidates(part: torch.Tensor, scheme: KQuant, narrower: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and minima `[candidates, rows]`, the covering ones first."""
    low, high = scheme.code_range
    least, most = part.amin(-1).clamp(max=0), part.amax(-1).clamp(min=0)
    ends = torch.tensor((_ENDS_OF_2_BITS if scheme.bits == 2 else _ENDS) if narrower else (1.0,), device=part.device)
    if not scheme.symmetric:
        lower, upper = (end.flatten()[:, None] for end in torch.meshgrid(ends, ends, indexing="ij"))
        scales, minima = (upper * most - lower * least) / high, -lower * least
        return scales.clamp(min=_TINY), minima
    extreme = torch.maximum(-least, most)
    if not narrower:
        scales = (extreme / high)[None]
    else:
        # The larger extreme may be on the longer side, so that the scale is negative, and may be clipped.
        sign = torch.where(most > -least, -1.0, 1.0)
        shares = torch.linspace(1.1 if scheme.table else 1.0, 0.5 if scheme.bits < 4 else 0.6, 16, device=part.device)
        scales = torch.cat([sign * extreme * shares[:, None] / -low, -sign * extreme * shares[:, None] / high])
    return torch.where(scales.abs() < _TINY, _TINY, scales), None


def _factor(wanted: torch.Tensor, weights: torch.Tensor, scheme: KQuant, minimum: bool) -> torch.Tensor:
    """The factor of every block, repeated for its groups, `[rows, groups]`: its multiples are nearest to `wanted`, by weighted squares."""
    kind = scheme.facts
    per = kind.block // kind.width
    goal, weights = (value.unflatten(1, (-1, per)).flatten(0, 1) for value in (wanted, weights))
    top = goal.gather(1, goal.abs().argmax(1, keepdim=True))
    ends = [kind.high] if minimum or kind.low >= 0 else [kind.low, kind.high]
    shares = torch.linspace(1.04, 0.5, _LEVELS).tolist()
    levels = [end * share for end in ends for share in ([1.0] if kind.high == 1 else shares)]
    best, least = scheme.factor(top / levels[0]), torch.full_like(top, torch.inf)
    for level in levels:
        tried = scheme.factor(top / level)
        for _ in range(2):  # as it is, then the least-squares factor for the integers that this gives
            found = scheme.on_levels(goal, tried, minimum)
            error = (weights * (found - goal).square()).sum(1, keepdim=True)
            better = error < least
            best, least = torch.where(better, tried, best), torch.where(better, error, least)
            integers = found / tried
            square = (weights * integers.square()).sum(1, keepdim=True)
            tried = scheme.factor((weights * integers * goal).sum(1, keepdim=True) / square.clamp(min=_TINY))
    return best.expand(-1, per).reshape(wanted.shape)


def _minimum(
    part: torch.Tensor, scheme: KQuant, scale: torch.Tensor, minimum: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The best minimum `[rows]` of a group given its scale, from a first guess."""
    total = weights.sum().clamp(min=_TINY)
    for _ in range(2):
        codes = scheme.codes(part, scale[:, None], minimum[:, None])
        minimum = ((codes * scale[:, None] - part) @ weights / total).clamp(min=0)
    return minimum


def _neighbours(
    scheme: KQuant,
    scale: torch.Tensor,
    d: torch.Tensor,
    minimum: torch.Tensor | None,
    dmin: torch.Tensor | None,
    g: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and minima `[candidates, rows]` of group `g`: the present ones, and those a step or two away."""
    steps = torch.tensor([0.0, -1, 1, -2, 2], device=scale.device)[:, None]
    if minimum is None or dmin is None:
        return scheme.on_levels(scale + steps * d, d), None
    one, other = (step.flatten()[:, None] for step in torch.meshgrid(steps[:, 0], steps[:, 0], indexing="ij"))
    shifts = scheme.on_levels(minimum[:, g] + other * dmin[:, g], dmin[:, g], minimum=True)
    return scheme.on_levels(scale + one * d, d), shifts
