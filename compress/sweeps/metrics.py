"""Metrics of a trial: names for objectives and constraints, their direction, and their display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """One number of a trial.

    Attributes:
        name: as objectives and constraints call it.
        better: `min` or `max`.
        label: of an axis, with its unit.
        unit: how values are written: unchanged (``), as a share (`%`) or as bytes (`B`).
        axis: values are divided by this on an axis.
        origin: `evaluation` (measured by the recipe's `evaluate`), `artifact`, or `speed` (measured apart).
    """

    name: str
    better: Literal["min", "max"]
    label: str
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


_SHARE: dict[str, Any] = {"unit": "%", "axis": 0.01}
_BYTES: dict[str, Any] = {"unit": "B", "axis": 1e6}

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("perplexity", "min", "perplexity on held-out text"),
        Metric("perplexity_increase", "min", "increase of the perplexity (%)", **_SHARE),
        Metric("kl", "min", "KL to the source (nats a token)"),
        Metric("top1_agreement", "max", "same most likely token (%)", **_SHARE),
        Metric("cosine", "max", "cosine similarity of embeddings"),
        Metric("perplexity_with_cache", "min", "perplexity with the compressed cache"),
        Metric("perplexity_increase_overall", "min", "increase of the perplexity, weights and cache (%)", **_SHARE),
        Metric("size", "min", "size of the tensors (MB)", origin="artifact", **_BYTES),
        Metric("cache_size", "min", "keys and values of a long text (MB)", origin="artifact", **_BYTES),
        Metric("decode_speed", "max", "decoding (tokens/s)", origin="speed"),
        Metric("prefill_speed", "max", "prefill (tokens/s)", origin="speed"),
        Metric("memory", "min", "memory of the process that runs it (MB)", origin="speed", **_BYTES),
    )
}

_AS_THEY_ARE = ("perplexity_increase", "kl", "top1_agreement", "perplexity_with_cache", "perplexity_increase_overall")
_OF_ITSELF = {
    "perplexity_increase": 0.0, "kl": 0.0, "top1_agreement": 1.0, "cosine": 1.0, "perplexity_increase_overall": 0.0,
}  # fmt: skip
"""Metrics that compare with the source, of the source itself."""


def of_artifact(metrics: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an artifact by metric; only those that were measured."""
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
    """The same of the model that the artifact was made from, from the artifact's manifest."""
    found: dict[str, Any] = {"size": manifest["bytes"]["before"]}
    if "before" in metrics:
        found["perplexity"] = metrics["before"]["perplexity"]
    found |= {name: value for name, value in _OF_ITSELF.items() if name in metrics}
    if manifest.get("kv_cache_bytes"):
        found["cache_size"] = manifest["kv_cache_bytes"][-1]["full_bytes"]
    return found


def of_speed(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a measured speed (`compress.evaluate.speed.measure`)."""
    return {
        "decode_speed": found["decode_tokens_per_second"],
        "prefill_speed": found["prefill_tokens_per_second"],
        "memory": found["peak_bytes"],
    }
