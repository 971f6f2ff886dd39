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
        path: where an artifact's manifest has it (a metric of speed: what `compress.evaluate.speed.measure` returns), keys joined by dots;
            empty: `metrics.NAME`.
        source: where the manifest has that of the model it was made from, or its value where the artifact is compared with that model.
        unit: how values are written: unchanged (``), as a share (`%`) or as bytes (`B`).
        axis: values are divided by this on an axis.
        origin: `evaluation` (measured by the recipe's `evaluate`), `artifact`, or `speed` (measured apart).
    """

    name: str
    better: Literal["min", "max"]
    label: str
    path: str = ""
    source: str | float | None = None
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
_CACHE: dict[str, Any] = {"path": "kv_cache_bytes.-1.bytes", "source": "kv_cache_bytes.-1.full_bytes"}


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("perplexity", "min", "perplexity on held-out text", "metrics.after.perplexity", "metrics.before.perplexity"),
        Metric("perplexity_increase", "min", "increase of the perplexity (%)", source=0.0, **_SHARE),
        Metric("kl", "min", "KL to the source (nats a token)", source=0.0),
        Metric("top1_agreement", "max", "same most likely token (%)", source=1.0, **_SHARE),
        Metric("cosine", "max", "cosine similarity of embeddings", "metrics.cosine.mean", 1.0),
        Metric("perplexity_with_cache", "min", "perplexity with the compressed cache"),
        Metric("perplexity_increase_overall", "min", "increase of the perplexity, weights and cache (%)", source=0.0, **_SHARE),
        Metric("size", "min", "size of all that is loaded (MB)", "bytes.total", "bytes.before", origin="artifact", **_BYTES),
        Metric("cache_size", "min", "keys and values of a long text (MB)", origin="artifact", **_CACHE, **_BYTES),
        Metric("decode_speed", "max", "decoding (tokens/s)", "decode_tokens_per_second", origin="speed"),
        Metric("prefill_speed", "max", "prefill (tokens/s)", "prefill_tokens_per_second", origin="speed"),
        Metric("memory", "min", "memory of the process that runs it (MB)", "peak_bytes", origin="speed", **_BYTES),
    )
}  # fmt: skip


def of_artifact(manifest: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an artifact by metric; only those that were measured."""
    every = {
        metric.name: _at(manifest, metric.path or f"metrics.{metric.name}")
        for metric in METRICS.values()
        if metric.origin != "speed"
    }
    return {name: value for name, value in every.items() if value is not None}


def of_source(manifest: Mapping[str, Any]) -> dict[str, float]:
    """The same of the model that the artifact was made from, from the artifact's manifest."""
    sources = {name: METRICS[name].source for name in of_artifact(manifest)}
    every = {name: _at(manifest, value) if isinstance(value, str) else value for name, value in sources.items()}
    return {name: value for name, value in every.items() if value is not None}


def of_speed(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a measured speed (`compress.evaluate.speed.measure`)."""
    return {metric.name: found[metric.path] for metric in METRICS.values() if metric.origin == "speed"}


def _at(content: Any, path: str) -> Any:
    """The value at a path; None where there is none."""
    for key in path.split("."):
        if not content:
            return None
        content = content[int(key)] if isinstance(content, list) else content.get(key)
    return content
