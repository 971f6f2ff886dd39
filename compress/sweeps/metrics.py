"""Metrics of a trial: names for objectives and constraints, their direction, and their display."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """One number of a trial.

    Attributes:
        name: as objectives and constraints call it.
        better: `min` or `max`.
        label: what an axis says, with its unit.
        summary: what it is, in a few words.
        unit: how values are written: as they are (``), as a share (`%`) or as bytes (`B`).
        axis: an axis shows values divided by this.
        origin: `evaluation` (the recipe's `evaluate` measures it), `artifact`, or `speed` (measured apart).
    """

    name: str
    better: Literal["min", "max"]
    label: str
    summary: str
    unit: Literal["", "%", "B"] = ""
    axis: float = 1.0
    origin: Literal["evaluation", "artifact", "speed"] = "evaluation"

    def show(self, value: float | None) -> str:
        """A value for a table."""
        if value is None:
            return ""
        if self.unit == "%":
            return f"{value:+.1%}" if self.better == "min" else f"{value:.1%}"
        if self.unit == "B":
            return f"{value / 1e6:.3f} MB" if value < 1e8 else f"{value / 1e9:.3f} GB"
        if value >= 1000:
            return f"{value:,.0f}"
        return f"{value:#.4g}" if value >= 1 else f"{value:#.3g}" if value else "0"


_PERPLEXITY = "perplexity on held-out text"

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("perplexity", "min", _PERPLEXITY, "of the artifact on held-out text"),
        Metric("perplexity_increase", "min", "increase of the perplexity (%)", "relative to the source model", "%", 0.01),
        Metric("kl", "min", "KL to the source (nats a token)", "KL divergence from the source model, nats a token"),
        Metric("top1_agreement", "max", "same most likely token (%)", "share of positions where source and artifact agree", "%", 0.01),
        Metric("cosine", "max", "cosine similarity of embeddings", "encoders: mean similarity to the source's embeddings"),
        Metric("perplexity_with_cache", "min", "perplexity with the compressed cache", "what follows a prompt, kv_cache stages"),
        Metric(
            "perplexity_increase_overall", "min", "increase of the perplexity, weights and cache (%)",
            "by weights and cache together, kv_cache stages", "%", 0.01,
        ),
        Metric("size", "min", "size of the tensors (MB)", "bytes of all tensors on the disk", "B", 1e6, "artifact"),
        Metric("cache_size", "min", "keys and values of a long text (MB)", "bytes of the cache, kv_cache stages", "B", 1e6, "artifact"),
        Metric("decode_speed", "max", "decoding (tokens/s)", "tokens a second, decoding", "", 1.0, "speed"),
        Metric("prefill_speed", "max", "prefill (tokens/s)", "tokens a second, reading a prompt", "", 1.0, "speed"),
        Metric("memory", "min", "memory of the process that runs it (MB)", "at its largest, bytes", "B", 1e6, "speed"),
    )
}  # fmt: skip


def of_artifact(metrics: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an artifact, by their names here; those that were not measured are not there."""
    found: dict[str, Any] = {"size": manifest["bytes"]["after"]}
    if "after" in metrics:
        found["perplexity"] = metrics["after"]["perplexity"]
    found |= {name: metrics[name] for name in _AS_THEY_ARE if name in metrics}
    if "cosine" in metrics:
        found["cosine"] = metrics["cosine"]["mean"]
    if manifest.get("kv_cache_bytes"):
        found["cache_size"] = manifest["kv_cache_bytes"][-1]["bytes"]
    return found


def of_source(metrics: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, float]:
    """The same of the model that the artifact was made from, as the artifact's own manifest tells them."""
    found: dict[str, Any] = {"size": manifest["bytes"]["before"]}
    if "before" in metrics:
        found |= {"perplexity": metrics["before"]["perplexity"], "perplexity_increase": 0.0}
    if "kl" in metrics:
        found |= {"kl": 0.0, "top1_agreement": 1.0}
    if "cosine" in metrics:
        found["cosine"] = 1.0
    if "perplexity_increase_overall" in metrics:
        found["perplexity_increase_overall"] = 0.0
    if manifest.get("kv_cache_bytes"):
        found["cache_size"] = manifest["kv_cache_bytes"][-1]["full_bytes"]
    return found


def of_speed(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a measured speed (`compress.evaluate.speed.measure`)."""
    return {name: read(found) for name, read in _SPEEDS.items()}


_AS_THEY_ARE = (
    "perplexity_increase",
    "kl",
    "top1_agreement",
    "perplexity_with_cache",
    "perplexity_increase_overall",
)
_SPEEDS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "decode_speed": lambda found: found["decode_tokens_per_second"],
    "prefill_speed": lambda found: found["prefill_tokens_per_second"],
    "memory": lambda found: found["peak_bytes"],
}
