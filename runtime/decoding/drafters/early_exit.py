"""The target's first layers draft, under its own norm and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.decoding.drafters.candidates import Candidates
from runtime.decoding.drafters.inside import WHERE, Inside, ViewDrafter, ViewLanes, engine_of, settings_of
from runtime.kv_cache.bounds import COUNT, bounded
from runtime.kv_cache.policy_fields import PolicyError, integer

if TYPE_CHECKING:
    from runtime.decoding.drafters.choose import Target


@dataclass(eq=False)
class EarlyExit(ViewDrafter):
    """The first layers of the target, as many each time; no training. It is good where the target was trained to be (LayerSkip).

    Source: Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding, arXiv 2404.16710.

    Attributes:
        layer: how many layers draft.
    """

    name: ClassVar[str] = "early-exit"
    layer: int = bounded(1, COUNT)

    def describe(self) -> str:
        return f"{self.name} after layer {self.layer}"


def build(target: Target, settings: Mapping[str, Any]) -> Inside:
    """The drafter of `{"method": "early-exit", "layer": "auto" or a number}`.

    Raises:
        RequestError: the engine does not compute with parts of a model, or it has no such layer.
    """
    from runtime.decoding.drafters.dynamic_exit import DynamicExit
    from runtime.engines.llama_view import View

    engine = engine_of(target, EarlyExit.name)
    layers = len(engine.parts.blocks)
    layer = settings.get("layer", "auto")
    if layers < 2:
        raise PolicyError((), f"the model has {layers} layer; an early exit needs at least 2", WHERE)
    if layer == "auto":
        values = settings_of(DynamicExit, {key: value for key, value in settings.items() if key != "layer"})
        return DynamicExit(lanes=ViewLanes(View(engine, range(1))), candidates=Candidates(engine.vocab_size), **values)
    try:
        integer(("layer",), layer)
    except PolicyError as error:
        raise PolicyError(("layer",), f"{error.text}, or 'auto'", WHERE) from None
    values = settings_of(EarlyExit, settings)
    if not 1 <= values["layer"] < layers:
        raise PolicyError(
            ("layer",), f"an early exit is after layer 1 to {layers - 1} of this model's {layers}, not {layer}", WHERE
        )
    view = View(engine, range(values["layer"]))
    return EarlyExit(lanes=ViewLanes(view), candidates=Candidates(engine.vocab_size), **values)
