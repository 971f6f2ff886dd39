"""Solve the weights that share one input: prune, quantize, or both, on one Hessian."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from compress.core.statistics import Statistics
from compress.prune import METHODS as PRUNE
from compress.prune import PruneConfig
from compress.quantize import METHODS as QUANTIZE
from compress.quantize import QuantizeConfig, check_fits
from compress.quantize.grid import Grid, make_grid
from compress.quantize.objective import row_errors
from compress.weights.fixed import Held
from compress.weights.solver.columns import rows_at_a_time
from compress.weights.solver.compensate import Constraint, Options, Solved, assemble, compensate, keep_float
from runtime.errors import CompressError
from runtime.formats.scheme import CompressedWeight, Scheme


@dataclass
class LayerResult:
    """A solved layer.

    Attributes:
        weight: what is stored.
        error: relative output error `tr(E H E^T) / tr(W H W^T)`; without a Hessian `|E|^2 / |W|^2`.
        notes: what a report should know: damping, retries, dead columns, rows where rounding to nearest was kept, sparsity.
    """

    weight: CompressedWeight
    error: float
    notes: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def solve_group(
    weights: list[torch.Tensor],
    statistics: Statistics | None,
    prune: PruneConfig | None,
    quantize: QuantizeConfig | None,
    scheme: Scheme,
    dtype: torch.dtype,
    names: list[str] | None = None,
    sparsity: list[float] | None = None,
    held: list[Held] | None = None,
) -> list[LayerResult]:
    """Solve weights that read the same input together.

    Args:
        weights: `[out_i, in]` each, any float dtype; not changed.
        statistics: of their common input; may be None for methods that need none.
        prune: pruning fields of the recipe, or None.
        quantize: quantization fields of the recipe, or None (values stay float).
        scheme: what `quantize` and `prune` mean, from `resolve_scheme`.
        dtype: of scales and of the dequantized weight.
        names: of the layers, for messages.
        sparsity: of each weight, where an allocation differs from `prune.sparsity`.
        held: of each weight, masks and grids that are not to be chosen again; weights are zero there, and on the grids, already.

    Raises:
        RequestError: a shape that the scheme or the pattern does not fit.
        CompressError: NaN or Inf in weights or statistics, missing statistics, a Hessian that cannot be factored.
    """
    names = names or [f"weight {i}" for i in range(len(weights))]
    if held is not None and len(held) != len(weights):
        raise CompressError(f"{names[0]}: what recovery has left of it is gone; run again without --resume")
    settled = prune if held is not None and held[0].mask is not None else None
    _check(
        weights, statistics, None if settled is not None else prune, None if _on_grid(held) else quantize, scheme, names
    )
    if held is not None and _on_grid(held):
        return [_kept(weight.detach(), own, scheme, dtype) for weight, own in zip(weights, held, strict=True)]
    current = [weight.detach() for weight in weights]
    fractions: tuple[float, ...] = ()
    masks: list[torch.Tensor] | None = None
    chosen_in_loop = False
    if prune is not None:
        fractions = tuple(sparsity) if sparsity is not None else (prune.target_sparsity,) * len(weights)
        masks = fixed_masks(current, statistics, prune, fractions) if settled is None else _masks(held, current)
        chosen_in_loop = masks is None
    compensated = quantize is not None and compensates(quantize)
    pattern = prune.parsed if prune is not None and chosen_in_loop else None
    hessian = statistics.hessian if statistics is not None else None

    apart = pattern is not None and not (compensated and getattr(quantize, "joint", True))
    if apart:
        # Pruning is a pass of its own; what follows rounds the pruned weights under its masks.
        assert hessian is not None
        assert prune is not None
        floats = Constraint(Scheme(sparsity=scheme.sparsity), torch.float32, None, pattern, fractions)
        pruned = compensate(current, hessian, floats, _options(prune), names[0])
        notes = [p.notes for p in pruned]
        current, masks, pattern = [p.weight.values for p in pruned], [p.weight.mask for p in pruned], None  # type: ignore[misc]
    else:
        notes = [{} for _ in weights]
    if compensated:
        assert hessian is not None
        constraint = Constraint(scheme, dtype, masks, pattern, fractions)
        options = _options(prune if pattern is not None else None, quantize)
        solved = compensate(current, hessian, constraint, options, names[0])
    else:
        solved = [
            Solved(
                nearest(weight, masks[i] if masks is not None else None, scheme, dtype, quantize, statistics),
                None,
                notes[i],
            )
            for i, weight in enumerate(current)
        ]
    # What rounding lost of weights that were pruned before says nothing of the original ones.
    return [
        _result(weight.detach(), found.weight, None if apart else found.lost, hessian, found.notes)
        for weight, found in zip(weights, solved, strict=True)
    ]


def _on_grid(held: list[Held] | None) -> bool:
    return held is not None and held[0].scale is not None


def _masks(held: list[Held] | None, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """What was held on the disk, where the weights are."""
    pairs = zip(held or (), weights, strict=True)
    return [own.mask.to(weight.device) for own, weight in pairs if own.mask is not None]


def _kept(weight: torch.Tensor, held: Held, scheme: Scheme, dtype: torch.dtype) -> LayerResult:
    """A weight that is on its grid, or has nothing to be rounded to, as it is stored."""
    grid, mask = held.grid, None if held.mask is None else held.mask.to(weight.device)
    assert grid is not None
    grid = Grid(grid.scheme, grid.scale.to(weight.device), None if grid.zero is None else grid.zero.to(weight.device))
    found, start = [], 0
    for part, kept in _parts(weight, mask, rows_at_a_time(weight.shape[1])):
        rows = grid.rows(start, start + len(part))
        found.append(assemble(rows.codes(part.float()), rows, kept, scheme, dtype))
        start += len(part)
    return _result(weight, _joined(found, mask), None, None, {"held": True})


def compensates(quantize: QuantizeConfig) -> bool:
    """Whether rounding errors are compensated: the method does so itself, or a transform whose `solver` field asks for it."""
    return QUANTIZE[quantize.method].compensates or getattr(quantize, "solver", None) == "gptq"


def fixed_masks(
    weights: list[torch.Tensor], statistics: Statistics | None, prune: PruneConfig, fractions: tuple[float, ...]
) -> list[torch.Tensor] | None:
    """Masks of a method that ranks the weights beforehand; None for one that chooses inside the column loop."""
    method = PRUNE[prune.method]
    if method.score is None:
        return None
    pattern = prune.parsed
    return [
        pattern.mask(method.score(weight.float(), statistics), fraction, method.per_row)
        for weight, fraction in zip(weights, fractions, strict=True)
    ]


def nearest(
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
    quantize: QuantizeConfig | None,
    statistics: Statistics | None,
) -> CompressedWeight:
    """Round a float weight `[out, in]` to nearest, or keep its float values, under a mask; some rows at a time."""
    rows = 2 * rows_at_a_time(weight.shape[1])  # less is in memory at once than in a column loop
    if scheme.weights is None or quantize is None:
        return _joined([keep_float(w.float(), m, scheme, dtype) for w, m in _parts(weight, mask, rows)], mask)
    importance = statistics.square_mean if statistics is not None else None
    hessian = statistics.hessian if statistics is not None else None
    grid: Grid | None = None
    if scheme.weights.strategy == "tensor":  # one grid for all rows
        grid = make_grid(weight.float(), scheme.weights, dtype, quantize.scales, importance, mask, hessian)
    found = []
    for part, kept in _parts(weight, mask, rows):
        part = part.float()
        own = grid or make_grid(part, scheme.weights, dtype, quantize.scales, importance, kept, hessian)
        found.append(assemble(own.codes(part), own, kept, scheme, dtype))
    return _joined(found, mask)


def _parts(
    weight: torch.Tensor, mask: torch.Tensor | None, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Some rows at a time of a weight and its mask."""
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        yield weight[part], None if mask is None else mask[part]


def _joined(parts: list[CompressedWeight], mask: torch.Tensor | None) -> CompressedWeight:
    """The weight that some rows each were compressed of."""
    first = parts[0]
    if len(parts) == 1:
        return first
    scale, zero = first.scale, first.zero_point
    if first.scheme.weights is not None and first.scheme.weights.strategy != "tensor":
        scale = torch.cat([part.scale for part in parts if part.scale is not None])
        zero = None if zero is None else torch.cat([part.zero_point for part in parts if part.zero_point is not None])
    return CompressedWeight(torch.cat([part.values for part in parts]), scale, zero, mask, first.scheme, first.dtype)


def _options(*configs: PruneConfig | QuantizeConfig | None) -> Options:
    """Solver settings from the fields of the configurations, later ones first."""
    fields: dict[str, Any] = {}
    for config in configs:
        fields |= {name: getattr(config, name) for name in Options.__dataclass_fields__ if hasattr(config, name)}
    return Options(**fields)


def _check(weights, statistics, prune, quantize, scheme, names) -> None:
    needs: set[str] = set()
    if prune is not None:
        needs |= PRUNE[prune.method].needs
    if quantize is not None:
        needs |= QUANTIZE[quantize.method].needs
    if needs and statistics is None:
        raise CompressError(f"{names[0]}: no calibration inputs were seen, and the method needs them")
    if "hessian" in needs and statistics is not None and statistics.hessian is None:
        raise CompressError(f"{names[0]}: the method needs second moments of the inputs, and they were not collected")
    if statistics is not None and not statistics.finite:
        raise CompressError(f"{names[0]}: the calibration inputs of this layer contain NaN or Inf")
    for weight, name in zip(weights, names, strict=True):
        if not bool(torch.isfinite(weight).all()):
            raise CompressError(f"{name}: the weights contain NaN or Inf")
        shape = (weight.shape[0], weight.shape[1])
        check_fits(scheme, shape, name)
        if prune is not None:
            prune.parsed.check(shape, name)


def _result(
    weight: torch.Tensor,
    compressed: CompressedWeight,
    lost: float | None,
    hessian: torch.Tensor | None,
    notes: dict[str, Any],
) -> LayerResult:
    """With the relative output error; `lost` is the absolute one where the solver knows it."""
    rows = rows_at_a_time(weight.shape[1])
    total = sum(float(row_errors(part.float(), hessian).sum()) for part in weight.split(rows))
    if lost is None:
        dense = compressed.dequantize()
        lost = sum(
            float(row_errors(a.float() - b.float(), hessian).sum())
            for a, b in zip(weight.split(rows), dense.split(rows), strict=True)
        )
    if compressed.mask is not None:
        notes = notes | {"sparsity": 1 - float(compressed.mask.float().mean())}
    return LayerResult(compressed, lost / total if total > 0 else 0.0, notes)
