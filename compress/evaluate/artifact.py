"""Quality of an artifact beside the recipe's model, held against the recipe's limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.core.progress import Reporter
from compress.evaluate.limits import check, contradiction
from compress.evaluate.streamed import Comparison
from compress.model.context import Context
from compress.model.streamed import StreamedModel


def evaluate_artifact(
    context: Context, artifact: StreamedModel, limits: Mapping[str, float], spill: Path | None, reporter: Reporter
) -> dict[str, Any]:
    """Quality before and after on the recipe's evaluation text, with its limits checked. Empty without `evaluate` in the recipe.

    Args:
        limits: see `compress.evaluate.limits.limits`.
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
    assert context.evaluation is not None
    metrics["text"] = context.evaluation.description
    metrics["sequence_length"] = context.streamed.rows.length(windows)
    if warning := contradiction(metrics):
        reporter.warn(warning)
        metrics["warning"] = warning
    metrics["limits"] = check(metrics, limits)
    return metrics
