"""What a dialect can say of one layer's weight, which depends on how the layer multiplies."""

from __future__ import annotations

from dataclasses import replace

from export.onnx.dialect import Dialect
from export.onnx.grid import Rules
from runtime.formats.scheme import Scheme


def multiplies_integers(scheme: Scheme) -> bool:
    """Whether the layer's product can be one of int8 codes: both sides are, and neither scale changes along the sum."""
    weights, acts = scheme.grid, scheme.activations
    if weights is None or acts is None or weights.type != "int" or acts.type != "int":
        return False
    return (
        weights.bits > 4 and weights.symmetric and weights.strategy != "group" and (acts.symmetric or not acts.dynamic)
    )


def layer_rules(scheme: Scheme, spoken: Dialect) -> Rules:
    """The rules of the dialect, without blocks of 8-bit codes where the layer multiplies integers.

    The writer and what is said before writing both ask here, so that nothing is announced that is not done.
    """
    return replace(spoken.rules, blocked_int8=False) if multiplies_integers(scheme) else spoken.rules
