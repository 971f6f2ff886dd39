"""Task of one layer: what the recipe asks of it, and the facts about its methods that the block pass acts on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress import prune, quantize
from compress.core.method import Method
from compress.prune.config import PruneConfig
from compress.prune.magnitude import MagnitudeConfig
from compress.quantize.config import QuantizeConfig
from compress.quantize.rtn import RTNConfig
from compress.quantize.transforms import METHODS as TRANSFORMS
from runtime.formats.scheme import Scheme


def share_global_scale(tasks: Mapping[str, LayerTask], weights: Sequence[torch.Tensor]) -> dict[str, LayerTask]:
    """The tasks of layers with these weights `[out_i, in]` that read one input, with one global scale in schemes that have one: engines
    fuse such layers."""
    return {name: replace(task, scheme=task.scheme.for_weights(weights)) for name, task in tasks.items()}


@dataclass
class LayerTask:
    """What the stages of a recipe do to one layer.

    Attributes:
        prune, quantize: config of the stage that prunes and of the one that quantizes it; None where no stage does.
        scheme: of its compressed weight; as long as there are candidates, the one of most bits.
        candidates: schemes of ascending bits, one of which a budget will choose; empty: `scheme` is settled.
        prune_stage, quantize_stage: index of the one that prunes it, and of the one that quantizes it.
        by_default: no stage names it; it is one of all linear layers.
        sparsity: its own share when the recipe spreads sparsity over layers, else None.
        settled: index of a recovery stage: masks and grids of the stages before it stay as they are. -1: there is none.
    """

    prune: Any
    quantize: Any
    scheme: Scheme
    prune_stage: int | None = None
    quantize_stage: int | None = None
    by_default: bool = False
    sparsity: float | None = None
    settled: int = -1
    candidates: tuple[Scheme, ...] = ()

    @property
    def pruned(self) -> bool:
        """Whether its mask is settled."""
        return self.prune_stage is not None and self.prune_stage < self.settled

    @property
    def quantized(self) -> bool:
        """Whether its grid is settled, and its weights are on it."""
        return self.quantize_stage is not None and self.quantize_stage < self.settled

    @property
    def share(self) -> float:
        """Fraction of its weights that is removed; 0.0 when nothing prunes it."""
        if self.prune is None:
            return 0.0
        return self.sparsity if self.sparsity is not None else self.prune.target_sparsity

    @property
    def _active(self) -> list[tuple[Any, Method]]:
        """Configs and methods that are still to be applied, pruning first."""
        found = []
        if self.prune is not None and not self.pruned:
            found.append((self.prune, prune.METHODS[self.prune.method]))
        if self.quantize is not None and not self.quantized:
            found.append((self.quantize, quantize.METHODS[self.quantize.method]))
        return found

    @property
    def methods(self) -> list[Method]:
        """The methods that are still to be applied, pruning first."""
        return [method for _, method in self._active]

    @property
    def needs(self) -> frozenset[str]:
        """What calibration must collect for it ("hessian", "ranges", "drift", "gradients", "samples"); empty for data-free methods."""
        needs: set[str] = set().union(*(m.needs for m in self.methods))
        if self.propagated:
            needs |= {"hessian", "drift"}
        if self.output_aware:
            needs.add("gradients")
        activations = self.scheme.activations
        if activations is not None and activations.calibrated:
            needs.add("ranges")
        if self.scheme.transform is not None and not self.quantized:
            needs |= set(TRANSFORMS[self.scheme.transform.name].needs)
            needs |= {"samples"} if "ranges" in needs else set()  # ranges are those of the transformed inputs
        if self.candidates and not self.quantized:
            needs.add("ranges")
        if self.prune is not None and not self.pruned and self.prune.allocation != "uniform":
            needs.add("ranges")
        return frozenset(needs)

    @property
    def compensates(self) -> bool:
        """Whether what is lost in some weights is made up for in others, by the column loop, in a method's own way, or by later layers.

        The solver then sees the layers before it as compressed.
        """
        if self.propagated:
            return True
        return any(config.column_loop() is not None or method.solve is not None for config, method in self._active)

    @property
    def propagated(self) -> bool:
        """Whether it makes up for the errors of the layers before it."""
        return any(config.objective != "layer" for config, _ in self._active if isinstance(config, QuantizeConfig))

    @property
    def output_aware(self) -> bool:
        """Whether errors are moved to where they change the predictions of the model least."""
        return any(config.objective == "output" for config, _ in self._active if isinstance(config, QuantizeConfig))

    @property
    def transform(self) -> Any:
        """`(weights, statistics, scheme, config) -> scale [in]` of a method that folds scales into neighbours, else None."""
        return next((m.scales for m in self.methods if m.scales is not None), None)

    def without_data(self) -> LayerTask:
        """The same grid and sparsity without calibration: weights are rounded to nearest, the smallest removed."""
        cut = None if self.prune is None else MagnitudeConfig(**_shared(self.prune, PruneConfig))
        grid = None if self.quantize is None else RTNConfig(**_shared(self.quantize, QuantizeConfig))
        return replace(self, prune=cut, quantize=grid, sparsity=self.share or None)

    def same_settings(self, other: LayerTask) -> bool:
        """Whether both can be solved together."""
        mine, theirs = ((own.prune, own.quantize, own.scheme, own.pruned, own.quantized) for own in (self, other))
        return mine == theirs

    def describe(self) -> str:
        """As reports name it: "sparsegpt 2:4 + gptq int4 g128"."""
        parts = []
        if self.prune is not None:
            pattern = str(self.prune.parsed)
            parts.append(f"{self.prune.method} {pattern if ':' in pattern else format(self.share, '.0%')}")
        if self.quantize is not None:
            assert self.scheme.weights is not None
            least = self.candidates[0].weights if self.candidates else None
            span = "" if least is None else f"{least.describe()} to "
            text = f"{self.quantize.method} {span}{self.scheme.weights.describe()}"
            text += "" if self.quantize.objective == "layer" else f" {self.quantize.objective}"
            text += "" if self.scheme.transform is None else f" {self.scheme.transform.name}"
            if self.scheme.activations is not None:
                text += f" {self.scheme.activations.describe()}"
            parts.append(text)
        return " + ".join(parts)


def _shared(config: Any, base: type[Any]) -> dict[str, Any]:
    """The given fields that every method's configuration has."""
    names = (base.model_fields.keys() & config.model_fields_set) - {"method", "allocation", "objective", "quality"}
    return {name: getattr(config, name) for name in names}
