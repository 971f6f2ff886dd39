"""Quality of an artifact beside the recipe's model, held against the recipe's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.core.progress import Reporter
from compress.evaluate.streamed import Comparison
from compress.model.context import Context
from compress.model.streamed import StreamedModel


def evaluate_artifact(
    context: Context, artifact: StreamedModel, spill: Path | None, reporter: Reporter
) -> dict[str, Any]:
    """Quality before and after on the recipe's held-out text, and its limits. Empty without `evaluate` in the recipe.

    Args:
        spill: directory of hidden states; None: they stay in memory.
    """
    config, windows = context.recipe.evaluate, context.windows
    if config is None or windows is None:
        return {}
    if not context.checkpoint_is_finite:
        reporter.warn("the source holds NaN or Inf, so its quality was not measured")
        return {}
    comparison = Comparison(context.reference, artifact, config.batch_size, spill, reporter)
    if context.streamed.kind == "encoder":
        metrics = comparison.embeddings(windows, context.source_ids(windows) if context.kept_tokens else windows)
    elif context.kept_tokens:
        metrics = comparison.texts(*context.same_text())
    else:
        metrics = comparison.tokens(windows)
    if "after" in metrics:
        metrics["perplexity_increase"] = metrics["after"]["perplexity"] / metrics["before"]["perplexity"] - 1.0
    metrics["sequence_length"] = context.streamed.rows.length(windows)
    metrics["limits"] = check_limits(metrics, config.limits())
    return metrics


def check_limits(metrics: dict[str, Any], limits: dict[str, float]) -> list[dict[str, Any]]:
    """[{"name", "limit", "value", "ok"}] of the limits on something that was measured; NaN fails every limit."""
    values = {
        "min_cosine": metrics.get("cosine", {}).get("mean"), "max_perplexity": metrics.get("after", {}).get("perplexity"),
        "max_perplexity_increase": metrics.get("perplexity_increase"), "max_kl": metrics.get("kl"),
        "min_top1_agreement": metrics.get("top1_agreement"),
    }  # fmt: skip
    return held_to({name: value for name, value in values.items() if value is not None}, limits)


def held_to(values: dict[str, float], limits: dict[str, float]) -> list[dict[str, Any]]:
    """[{"name", "limit", "value", "ok"}] of the limits on one of `values`: those named min_ are the least allowed, others the most."""
    return [
        {
            "name": name,
            "limit": limit,
            "value": values[name],
            "ok": bool(values[name] >= limit if name.startswith("min_") else values[name] <= limit),
        }
        for name, limit in sorted(limits.items())
        if name in values
    ]
