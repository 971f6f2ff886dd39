"""Limits on an artifact's quality: the recipe's, or defaults that follow from the bits and zeros of its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from compress.model.stage import StageRoom, TensorPlan
from compress.recipe import KINDS, Recipe
from compress.recipe.models import AUTO

# Largest cost of rounding by bits: KL divergence in nats per token, and the share of top-1 tokens that change. The values are several
# times what the bundled models lose on text of their own kind, and less than what ruined ones do (benchmarks/results/limits.json).
_ROUNDING = {1.0: (1.0, 0.5), 2.0: (0.5, 0.4), 3.0: (0.25, 0.3), 4.0: (0.1, 0.2), 8.0: (0.03, 0.1)}
# Largest cost of zeros: a factor of their share squared (KL), and of their share (top-1).
_ZEROS = (1.2, 0.5)


def limits(recipe: Recipe, tensors: Sequence[TensorPlan], encoder: bool = False) -> dict[str, float]:
    """The limits of a recipe's `evaluate`, "auto" resolved.

    There are no defaults for encoders, after stages that change the shapes (channels, layers, tokens), and if no layer is compressed.

    Args:
        tensors: the plan of every tensor.
    """
    config = recipe.evaluate
    if config is None:
        return {}
    found = config.limits()
    automatic = [name for name in ("max_kl", "min_agreement") if getattr(config, name) == AUTO]
    if automatic and not encoder and not cutting(recipe):
        found |= {name: value for name, value in usual(tensors).items() if name in automatic}
    return found


def cache_limits(recipe: Recipe) -> dict[str, float]:
    """Limits on a compressed cache against a plain one of the same model: the recipe's, or the defaults of 4-bit layers."""
    config = recipe.evaluate
    names = dict(zip(("max_kl", "min_agreement"), _ROUNDING[4.0], strict=True))
    names["min_agreement"] = 1.0 - names["min_agreement"]
    written = {name: names[name] if getattr(config, name) == AUTO else getattr(config, name) for name in names}
    return {f"{name}_cache": value for name, value in written.items() if isinstance(value, float)}


def cutting(recipe: Recipe) -> list[str]:
    """Kinds of the stages that change the model's shapes."""
    kinds: Sequence[tuple[Any, StageRoom]] = [(stage, KINDS[stage.kind]) for stage in recipe.stages]
    return [room.name for stage, room in kinds if stage.phase == "model" and not room.settles_layers]


def usual(tensors: Sequence[TensorPlan]) -> dict[str, float]:
    """Default `max_kl` and `min_agreement`: the mean over compressed layers, weighted by bytes; {} if none is compressed."""
    compressed = [tensor for tensor in tensors if tensor.bits is not None]
    total = sum(tensor.bytes_before for tensor in compressed)
    if not total:
        return {}
    kl = changed = 0.0
    for tensor in compressed:
        assert tensor.bits is not None
        share = tensor.bytes_before / total
        rounding = _rounding(tensor.bits)
        kl += share * (rounding[0] + _ZEROS[0] * tensor.sparsity**2)
        changed += share * (rounding[1] + _ZEROS[1] * tensor.sparsity)
    return {"max_kl": float(f"{kl:.2g}"), "min_agreement": round(1.0 - changed, 2)}


def _rounding(bits: float) -> tuple[float, float]:
    """Entry of `_ROUNDING`, interpolated between bits; (0, 0) for weights that are not rounded."""
    if bits >= 16:
        return 0.0, 0.0
    bits = min(max(bits, min(_ROUNDING)), max(_ROUNDING))
    low, high = next(pair for pair in pairwise(_ROUNDING) if pair[0] <= bits <= pair[1])
    part = (bits - low) / (high - low)
    (kl, changed), (next_kl, next_changed) = _ROUNDING[low], _ROUNDING[high]
    return kl * (next_kl / kl) ** part, changed + part * (next_changed - changed)


def check(metrics: Mapping[str, Any], allowed: Mapping[str, float]) -> list[dict[str, Any]]:
    """[{"name", "limit", "value", "ok"}] for each limit on a measured metric; NaN fails every limit."""
    values = {
        "min_cosine": metrics.get("cosine", {}).get("mean"), "max_perplexity": metrics.get("after", {}).get("perplexity"),
        "max_perplexity_increase": metrics.get("perplexity_increase"), "max_kl": metrics.get("kl"),
        "min_agreement": metrics.get("top1_agreement"),
    }  # fmt: skip
    return held_to({name: value for name, value in values.items() if value is not None}, allowed)


def held_to(values: Mapping[str, float], allowed: Mapping[str, float]) -> list[dict[str, Any]]:
    """[{"name", "limit", "value", "ok"}] for each limit on one of `values`: min_ limits are lower bounds, the others upper bounds."""
    return [
        {
            "name": name,
            "limit": limit,
            "value": values[name],
            "ok": bool(values[name] >= limit if name.startswith("min_") else values[name] <= limit),
        }
        for name, limit in sorted(allowed.items())
        if name in values
    ]


def exceeded(metrics: Mapping[str, Any]) -> list[str]:
    """A sentence for each limit that the metrics of a manifest exceed."""
    found = []
    for limit in metrics.get("limits") or []:
        if not limit["ok"]:
            value = "was not measured" if limit["value"] is None else f"is {limit['value']:.4g}"
            found.append(f"{limit['name']} {value}; the limit is {limit['limit']:.4g}")
    return found


#: KL divergence in nats per token above which a falling perplexity is not an improvement.
_HIGH_KL = 0.05


def contradiction(metrics: Mapping[str, Any]) -> str:
    """A warning that perplexity falls while the KL divergence from the source is high; else empty."""
    change, kl = metrics.get("perplexity_increase"), metrics.get("kl")
    if change is None or kl is None or not (change < 0 and kl > _HIGH_KL) or math.isnan(kl):
        return ""
    return (
        f"perplexity falls by {-change:.1%} while the KL divergence from the source is {kl:.3g} nats per token: the artifact predicts "
        "other tokens, which perplexity on this text hides; judge it by KL divergence and top-1 agreement, on text like the model's own"
    )
