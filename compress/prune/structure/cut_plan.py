"""Plan of a cut: which axis, how many units stay, and which slices of which tensors they have; known without the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from compress.model.config_sizes import Size, resized, with_widths
from compress.model.couplings import Slices
from compress.model.footprint import ModelSize
from compress.model.stage import Job
from compress.prune.structure import METHODS, StructureConfig, StructureMethod
from compress.prune.structure.amount import between
from compress.prune.structure.vocabulary import Tokens

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


Plan = TypeVar("Plan", bound="CutPlan")


@dataclass(frozen=True)
class CutPlan(Job):
    """What will be removed, as far as it is known without the weights.

    Attributes:
        stage: of the recipe.
        whole: the model, in numbers.
        size: what there is. kept: units that stay.
        config: of the smaller model.
        slices: what units have of which tensors; none where layers go.
        units: of each block, the `Channels` by the layer that reads them, or its `Experts`; none where something else goes.
        measured: what was timed to find how many stay, JSON-able, see `latency`; empty without a budget of latency.
        tokens: that stay; None where something else goes.
        widths: channels of each layer that stay, where they differ; `kept` is the most of them then. Empty: `kept` in each, or, with
            `allocation: error`, that is found when the model is seen, and `kept` is their mean.
    """

    whole: ModelSize
    size: Size
    kept: int
    config: PretrainedConfig
    slices: tuple[Slices, ...] = ()
    units: tuple[tuple[Any, ...], ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    tokens: Tokens | None = None
    widths: tuple[int, ...] = ()

    @property
    def settings(self) -> StructureConfig:
        """The stage's fields."""
        return self.stage.config

    @property
    def method(self) -> StructureMethod:
        """What ranks the units."""
        return METHODS[self.stage.method]

    @property
    def kept_tokens(self) -> torch.Tensor | None:
        """See `Job.kept_tokens`."""
        return None if self.tokens is None else self.tokens.kept

    @property
    def stored(self) -> int:
        """See `Job.stored`."""
        return self.whole.stored

    @property
    def needs(self) -> set[str]:
        """What must be collected; a refit needs second moments, norms over fewer dimensions what they divide by."""
        settings, needs = self.settings, set[str](self.method.needs)
        if (settings.reconstruct and settings.axis.fitted == "readers") or settings.allocation == "error":
            needs.add("hessian")
        return needs | {"states"} if settings.axis.fitted == "layers" else needs

    def width(self, layer: int) -> int:
        """Units of a layer that stay."""
        return self.widths[layer] if self.widths else self.kept

    @property
    def mean_width(self) -> float:
        """Units of a layer that stay, in the mean; a whole number where it is one."""
        mean = sum(self.widths) / len(self.widths) if self.widths else self.kept
        return int(mean) if mean == int(mean) else round(mean, 1)

    def choices(self) -> range:
        """Channels that a layer may keep, where it is left to their errors: half as many as in all layers, to all but some."""
        least, most, multiple = between(self.settings, self.size)
        start = max(least, -(-self.kept // (2 * multiple)) * multiple)
        return range(start, most + 1, multiple)

    def smaller(self, config: PretrainedConfig) -> PretrainedConfig:
        """The config that the cut makes of one."""
        remove, kept = self.settings.remove, self.kept
        result = with_widths(config, self.widths) if self.widths else resized(config, remove, kept)
        return result if self.tokens is None else self.tokens.config(config, result)

    def of_widths(self: Plan, widths: Sequence[int], config: PretrainedConfig) -> Plan:
        """The plan with so many channels in each layer. `config`: of the whole model."""
        alike = len(set(widths)) == 1
        plan = replace(self, kept=max(widths), widths=() if alike else tuple(widths))
        return replace(plan, config=plan.smaller(config))

    def describe(self) -> str:
        """For people: "ffn 1024 -> 768 channels by obs, readers refitted"."""
        settings, size, kept, timed = self.settings, self.size, str(self.kept), ""
        fitted = f", {settings.axis.fitted} refitted" if settings.reconstruct and settings.axis.fitted else ""
        if self.measured:
            before, after = (1e3 * self.measured[when] for when in ("before", "after"))
            timed = f" (latency measured: {self.measured['of']} {before:.3g} -> about {after:.3g} ms)"
        if self.widths:
            kept = f"{min(self.widths)} to {kept}{' by layer' if settings.allocation == 'error' else ''}"
        elif settings.allocation == "error":
            kept = f"a mean of {kept}"
        return f"{settings.remove} {size.count} -> {kept} {size.unit} by {self.stage.method}{fitted}{timed}"
