"""Task of one layer: what the recipe asks of it, and the facts about its methods that the block pass acts on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress import prune, quantize
from compress.core.method import Method, Problem
from compress.core.statistics import Statistics
from compress.prune.config import PruneConfig
from compress.prune.magnitude import MagnitudeConfig
from compress.quantize.config import QuantizeConfig
from compress.quantize.fixed import Held
from compress.quantize.rtn import RTNConfig
from compress.weights.assign import Assignment
from compress.weights.solver.group import compensates
from runtime.formats.scheme import Scheme


@dataclass
class LayerWork:
    """One layer's assignment.

    Attributes:
        sparsity: its own share when the recipe spreads sparsity over layers, else None.
        settled: number of the recovery stage before which all was done already: what it was pruned by then, or quantized, stays.
    """

    assignment: Assignment
    sparsity: float | None = None
    settled: int = -1

    @property
    def pruned(self) -> bool:
        """Which of its weights are removed is settled."""
        stage = self.assignment.prune_stage
        return stage is not None and stage < self.settled

    @property
    def quantized(self) -> bool:
        """Its grid is settled, and its weights are on it."""
        stage = self.assignment.quantize_stage
        return stage is not None and stage < self.settled

    def hold(self, held: list[Held | None]) -> list[Held] | None:
        """Of what is held of layers, what is not to be chosen again; None: everything is."""
        if not self.pruned and not self.quantized:
            return None
        return [
            Held(own.mask if self.pruned else None, own.scheme, *((own.scale, own.zero) if self.quantized else ()))
            for own in held
            if own is not None
        ]

    @property
    def prune(self) -> Any:
        return self.assignment.prune

    @property
    def quantize(self) -> Any:
        return self.assignment.quantize

    @property
    def scheme(self) -> Scheme:
        return self.assignment.scheme

    @property
    def share(self) -> float:
        """Fraction of its weights that is removed; 0.0 when nothing prunes it."""
        if self.prune is None:
            return 0.0
        return self.sparsity if self.sparsity is not None else self.prune.target_sparsity

    @property
    def methods(self) -> list[Method]:
        """The methods that have something to do, pruning first."""
        found = []
        if self.assignment.prune is not None and not self.pruned:
            found.append(prune.METHODS[self.assignment.prune.method])
        if self.assignment.quantize is not None and not self.quantized:
            found.append(quantize.METHODS[self.assignment.quantize.method])
        return found

    @property
    def needs(self) -> frozenset[str]:
        """What calibration must collect for it ("hessian", "ranges"); empty for data-free work."""
        needs: set[str] = set().union(*(m.needs for m in self.methods))
        activations = self.scheme.activations
        if activations is not None and not activations.dynamic:
            needs.add("ranges")
        if self.prune is not None and not self.pruned and self.prune.allocation != "uniform":
            needs.add("ranges")
        return frozenset(needs)

    @property
    def compensates(self) -> bool:
        """Whether a solver makes up for errors in later columns; then it pays to look at what the layers before it became."""
        configs = [] if self.pruned else [self.prune]
        configs += [] if self.quantized else [self.quantize]
        return any(
            compensates(config, method)
            for config, method in zip([c for c in configs if c is not None], self.methods, strict=True)
        )

    @property
    def transform(self) -> Any:
        """`(weights, statistics, scheme, config) -> scale [in]` of a method that folds scales into neighbours, else None."""
        return next((m.scales for m in self.methods if m.scales is not None), None)

    def without_data(self) -> LayerWork:
        """The same grid and the same number of zeros, chosen without calibration: weights are rounded to nearest, the smallest removed."""
        own = self.assignment
        cut = None if own.prune is None else MagnitudeConfig(**_shared(own.prune, PruneConfig), method="magnitude")
        grid = None if own.quantize is None else RTNConfig(**_shared(own.quantize, QuantizeConfig), method="rtn")
        return replace(self, assignment=replace(own, prune=cut, quantize=grid), sparsity=self.share or None)

    def problem(
        self,
        names: list[str],
        weights: list[torch.Tensor],
        statistics: Statistics | None,
        dtype: torch.dtype,
        held: Mapping[str, Held],
    ) -> Problem:
        """What the solver is given for layers of these settings; `held` are masks and grids of layers by name."""
        sparsity = None if self.prune is None else [self.share] * len(names)
        own = self.hold([held.get(name) for name in names])
        return Problem(weights, statistics, self.prune, self.quantize, self.scheme, dtype, names, sparsity, own)

    def same_settings(self, other: LayerWork) -> bool:
        """Whether both can be solved in one go."""
        mine, theirs = ((own.prune, own.quantize, own.scheme, own.pruned, own.quantized) for own in (self, other))
        return mine == theirs

    def describe(self) -> str:
        """As reports name it: "sparsegpt 2:4 + gptq int4 g128"."""
        parts = []
        if self.prune is not None:
            pattern = str(self.prune.parsed)
            parts.append(
                f"{self.prune.method} {pattern}" if ":" in pattern else f"{self.prune.method} {self.share:.0%}"
            )
        if self.quantize is not None:
            assert self.scheme.weights is not None
            text = f"{self.quantize.method} {self.scheme.weights.describe()}"
            if self.scheme.activations is not None:
                text += f" a{self.scheme.activations.bits} {'dynamic' if self.scheme.activations.dynamic else 'static'}"
            parts.append(text)
        return " + ".join(parts)


def _shared(config: Any, base: type[Any]) -> dict[str, Any]:
    """What every method's configuration has."""
    return {
        name: getattr(config, name)
        for name in base.model_fields
        if name in config.model_fields_set and name not in ("method", "allocation")
    }
