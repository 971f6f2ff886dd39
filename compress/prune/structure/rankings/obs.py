"""Optimal brain surgeon for whole units: the unit that the others compensate best is removed next."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from compress.prune.structure.config import StructureConfig
from compress.prune.structure.least_squares import damped
from compress.prune.structure.method import StructureMethod, View
from runtime.errors import CompressError


class OBSConfig(StructureConfig):
    """Remove, one after the other, the unit without which the layer that reads them errs least when its other weights are refitted.

    The error is that of the reader's output over calibration inputs, by their second moments; after each removal weights and moments are
    brought up to date, so that of two channels that say the same only one goes.
    """

    method: Literal["obs"] = Field("obs", description="Name of the method.")
    at_once: int | None = Field(
        None,
        ge=1,
        description="Units that go between two updates; none: a sixty-fourth of those that go, at least one.",
    )


def rank(view: View, config: OBSConfig) -> torch.Tensor:
    """`[units]`: the turn in which each is removed; those that stay have the largest, by the cost of their removal."""
    assert view.statistics.hessian is not None
    going = view.count - view.kept
    at_once = config.at_once or max(1, going // 64)
    each, count = view.each, view.count
    weight = view.columns.double().clone()
    inverse = _inverse(damped(view.statistics.hessian.to(weight), config.damping))
    turn = torch.full((count,), torch.inf, dtype=torch.float64)
    left = going
    while left > 0:
        cost = _costs(weight, inverse, count, each)
        cost[turn.isfinite()] = torch.inf
        chosen = cost.argsort(stable=True)[: min(at_once, left)]
        turn[chosen] = torch.arange(going - left, going - left + len(chosen), dtype=torch.float64)
        places = (chosen[:, None] * each + torch.arange(each)).reshape(-1)
        corner = torch.linalg.cholesky(inverse[places][:, places])
        rows = torch.cholesky_solve(inverse[places], corner)
        weight -= weight[:, places] @ rows
        inverse -= inverse[:, places] @ rows
        weight[:, places] = 0
        # Removed units no longer affect the others, and their own corner stays invertible.
        inverse[places] = 0
        inverse[:, places] = 0
        inverse[places, places] = 1
        left -= len(chosen)
    cost = _costs(weight, inverse, count, each)
    stays = turn.isinf()
    order = cost[stays].argsort(stable=True).argsort(stable=True)
    turn[stays] = going + order.double()
    return turn.float()


def _costs(weight: torch.Tensor, inverse: torch.Tensor, count: int, each: int) -> torch.Tensor:
    """Squared output error that the removal of each unit adds, `[units]`: tr(W_u (H^-1)_uu^-1 W_u^T)."""
    if each == 1:
        return weight.square().sum(0) / inverse.diagonal()
    view = inverse.view(count, each, count, each)
    corners = torch.stack([view[unit, :, unit, :] for unit in range(count)])
    columns = weight.view(len(weight), count, each).permute(1, 2, 0)
    solved = torch.cholesky_solve(columns, torch.linalg.cholesky(corners))
    return (columns * solved).sum((1, 2))


def _inverse(moments: torch.Tensor) -> torch.Tensor:
    factor, failed = torch.linalg.cholesky_ex(moments)
    if int(failed):
        raise CompressError("the second moments of a layer's inputs cannot be factored; raise damping")
    return torch.cholesky_inverse(factor)


METHOD = StructureMethod(
    OBSConfig,
    rank,
    summary="removes the units that the others can best make up for, one after the other",
    paper="Hassibi and Stork, Optimal Brain Surgeon, 1993; of structures: Kurtic et al., ZipLM, 2023, arXiv 2302.04089",
    removes={"ffn", "heads"},
    needs={"hessian"},
)
