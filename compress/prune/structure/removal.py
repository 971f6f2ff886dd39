"""Removal of units along any axis: what the axes share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from compress.model import rewrite
from compress.model.couplings import Slices, changed
from compress.model.rewrite import Lines, Rewrite, Tensors
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.amount import skeleton_of
from compress.prune.structure.cut_plan import CutPlan, Plan
from compress.prune.structure.method import View
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import find_stacks, set_tensor

Pass = rewrite.Pass[CutPlan]


class Cut:
    """Which units stay of which tensors: `cut(name, tensor)` is the tensor that the smaller model has.

    Args:
        parts: slices of a tensor, and the units that stay, int64, ascending.
    """

    def __init__(self, parts: Iterable[tuple[Slices, torch.Tensor]] = ()) -> None:
        self._parts: dict[str, list[tuple[Slices, torch.Tensor]]] = {}
        for slices, kept in parts:
            self._parts.setdefault(slices.name, []).append((slices, kept))

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without the units that go, in its own dtype."""
        for slices, kept in self._parts.get(name, ()):
            tensor = slices.cut(tensor, kept)
        return tensor

    def all(self, tensors: Tensors) -> Tensors:
        """Several, by name."""
        return {name: self(name, value) for name, value in tensors.items()}

    def slices(self, name: str) -> list[Slices]:
        """Those of one tensor."""
        return [slices for slices, _ in self._parts.get(name, ())]


class Removal(Rewrite[CutPlan]):
    """Removal of the units of one axis."""

    @cached_property
    def smaller(self) -> list[nn.Module]:
        """Its blocks."""
        return [block for _, stack in find_stacks(self.skeleton) for block in stack]

    # ---------------------------------------------------------------- hooks of an axis
    @classmethod
    def check(cls, streamed: StreamedModel) -> None:
        """RequestError where no units of this axis can be removed from a model."""

    @classmethod
    def complete(cls, plan: Plan, streamed: StreamedModel) -> Plan:
        """The plan with the slices of its units, and the units of each block; RequestError where they cannot be cut."""
        slices = changed(streamed.model, skeleton_of(plan.config, streamed), plan.size.count, plan.kept)
        if not slices:
            kind = type(streamed.model).__name__
            raise RequestError(f"the config of a {kind} cannot say that it has fewer {plan.size.unit}")
        return replace(plan, slices=tuple(slices))

    @classmethod
    def complete_by_block(cls, plan: Plan, streamed: StreamedModel, units_of: Callable[..., tuple[Any, ...]]) -> Plan:
        """The same of units that are all in blocks; `units_of(model, slices, prefix)` gives those of a block."""
        plan = Removal.complete(plan, streamed)
        for part in plan.slices:
            if not streamed.is_inside(part.name):
                kind = type(streamed.model).__name__
                raise RequestError(f"{part.name} of a {kind} is in no layer and has parts of these {plan.size.unit}")
        prefixes = map(streamed.block_prefix, range(len(streamed.blocks)))
        return replace(plan, units=tuple(units_of(streamed.model, plan.slices, prefix) for prefix in prefixes))

    # ---------------------------------------------------------------- shared by axes
    def first_row(self) -> tuple[torch.Tensor, Batch]:
        """One row that enters the current block, and its batch, for trials."""
        ids, mask = self.batches[0]
        return self.states["hidden"].get(0)[:1], (ids[:1], None if mask is None else mask[:1])

    def cut_block(self, index: int, cut: Cut) -> nn.Module:
        """The smaller model's block, cut out of the one in memory."""
        block, prefix = copy.deepcopy(self.smaller[index]), self.whole.block_prefix(index)
        for name in [name for name, _ in [*block.named_parameters(), *block.named_buffers()]]:
            set_tensor(block, name, cut(prefix + name, self.loaded(prefix + name)))
        return block

    def rank(self, what: str, count: int, kept: int, seed: int, **seen: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """Importance of each unit, float32, and the notes of the method.

        Args:
            what: "the experts of layer 3". seed: added to the recipe's. seen: fields of the `View`.
        """
        method, settings = self.job.method, self.job.settings
        view = View(count, kept, torch.Generator().manual_seed(settings.seed + seed), **seen)
        rank = method.rank(view, settings)
        if not bool(torch.isfinite(rank).all()):
            raise CompressError(f"{what} cannot be ranked: {method.name} gives NaN or Inf")
        return rank, view.notes


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """CompressError that names the tensor with NaN or Inf."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CompressError(f"{name}: the weight holds NaN or Inf; repair the checkpoint")


def note_of(lines: Lines) -> str:
    """Progress note of a block: the largest error of its layers."""
    worst = max((line["error"] for line in lines if line["error"] is not None), default=None)
    return "cut" if worst is None else f"cut, error {worst:.2e}"


def best(rank: torch.Tensor, count: int, groups: int = 1) -> torch.Tensor:
    """Which units stay, ascending: int64 `[count]`, of each group as many; of equals the first."""
    order = rank.reshape(groups, -1).argsort(dim=1, descending=True, stable=True)[:, : count // groups]
    return (order + torch.arange(groups, device=rank.device)[:, None] * (len(rank) // groups)).reshape(-1).sort().values
